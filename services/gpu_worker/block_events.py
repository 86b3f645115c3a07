"""Tells schedulers which blocks L1 holds, so that a leg goes where its prefix is. Pure."""

from collections.abc import Iterable

from services.gpu_worker.block_pool import CHANGES_MAX, BlockPool
from shared.core import Outbox
from shared.kv import SHORT_SIZE, BlockHash
from shared.messages import BlocksChanged
from shared.subjects import everyone, inbox

EVERY_S = 0.1  # at most; as often as beats


class BlockEvents:
    """`tell` regularly, `answer` who asks; all that is said goes into `outbox`."""

    def __init__(self, worker: str, pool: BlockPool, outbox: Outbox) -> None:
        self._worker = worker
        self._pool = pool
        self._outbox = outbox
        self._seq = 0
        self._next_at = float("-inf")

    def tell(self, now: float) -> None:
        """What has changed since the last time; nothing, if nothing has."""
        if not self._pool.changes or now < self._next_at:
            return
        self._next_at = now + EVERY_S
        self._seq += 1
        changes = self._pool.take_changes()
        if len(changes) > CHANGES_MAX:
            self._tell_all(everyone("scheduler"))
            return
        message = BlocksChanged(
            worker=self._worker,
            seq=self._seq,
            added=_shorts(name for name, is_here in changes.items() if is_here),
            removed=_shorts(name for name, is_here in changes.items() if not is_here),
        )
        self._outbox.put(everyone("scheduler"), message)

    def wake_at(self) -> float | None:
        """When there is something to tell; None = there is nothing."""
        return self._next_at if self._pool.changes else None

    def answer(self, scheduler: str) -> None:
        """All that is here. What is still to be told says some of it again."""
        self._tell_all(inbox(scheduler))

    def _tell_all(self, subject: str) -> None:
        """In parts that any bus takes: the first is `whole`, the others add to it under the same
        `seq`. One that is lost makes a guess worse, no more.
        """
        names = self._pool.names
        for start in range(0, max(1, len(names)), CHANGES_MAX):
            part = BlocksChanged(
                worker=self._worker,
                seq=self._seq,
                added=_shorts(names[start : start + CHANGES_MAX]),
                whole=not start,
            )
            self._outbox.put(subject, part)


def _shorts(names: Iterable[BlockHash]) -> bytes:
    return b"".join([name[:SHORT_SIZE] for name in names])
