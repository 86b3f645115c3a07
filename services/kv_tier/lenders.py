"""The memory that workers of this host lend: mapped once per worker, dropped after its end.

A map outlives its worker for a while, so that blocks are still written which it handed over before
it died; and whoever works on a slot keeps its map, so that dropping one hurts nobody.
"""

import os
import select
from collections.abc import Sequence

from shared.messages import Lent
from shared.slots import BorrowedSlots

_LINGER_S = 2.0  # what a dead worker has sent is here by then


class _Lender:
    """A worker's memory, and its process, which its id alone would not name: ids are used again."""

    def __init__(self, lent: Lent) -> None:
        """Raises `OSError` or `ValueError`."""
        self._process = os.pidfd_open(lent.pid)
        try:
            self.memory = BorrowedSlots.open(lent)
        except BaseException:
            os.close(self._process)
            raise
        self._ends = select.poll()
        self._ends.register(self._process, select.POLLIN)
        self.gone_at: float | None = None

    @property
    def is_gone(self) -> bool:
        return bool(self._ends.poll(0))

    def close(self) -> None:
        os.close(self._process)


class Lenders:
    """Maps of at most `limit` workers; `refused` counts what could not or may not be used."""

    def __init__(self, limit: int) -> None:
        self.refused = 0
        self._limit = limit
        self._lenders: dict[tuple[str, Lent], _Lender] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._lenders)

    def use(
        self, worker: str, lent: Lent | None, slots: Sequence[int], generation: int
    ) -> BorrowedSlots | None:
        """Their memory, if all these slots are lent to us for `generation`; then give them back."""
        if lent is None or not slots:
            return None
        lender = self._lenders.pop((worker, lent), None) or _open(lent)
        if lender is None:
            self.refused += 1
            return None
        self._lenders[worker, lent] = lender
        if len(self._lenders) > self._limit:
            self._drop(next(iter(self._lenders)))
        if not lender.memory.may_use(slots, generation) or len(set(slots)) < len(slots):
            self.refused += 1
            return None
        return lender.memory

    def sweep(self, now: float) -> None:
        """Drop the memory of workers that ended a while ago."""
        for key, lender in list(self._lenders.items()):
            if lender.gone_at is None and lender.is_gone:
                lender.gone_at = now
            if lender.gone_at is not None and now - lender.gone_at >= _LINGER_S:
                self._drop(key)

    def close(self) -> None:
        for key in list(self._lenders):
            self._drop(key)

    def _drop(self, key: tuple[str, Lent]) -> None:
        """Unmapped when the last who works on it lets go."""
        self._lenders.pop(key).close()


def _open(lent: Lent) -> _Lender | None:
    try:
        lender = _Lender(lent)
    except (OSError, OverflowError, ValueError):
        return None
    if not lender.is_gone:
        return lender
    lender.close()  # what was mapped may be of a successor in its process id
    return None
