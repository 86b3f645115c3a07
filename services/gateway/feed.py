"""Events of one session on their way to one client: bounded, and merged for a slow reader."""

import asyncio
from collections.abc import Sequence
from typing import TypeVar

from services.gateway.events import Delta, Opening, SessionEnd, SessionEvent
from services.gateway.stored.events import Shown
from shared.errors import Overloaded

E = TypeVar("E", Delta | SessionEnd, Shown)

MERGE_AT = 256  # waiting events; a reader that keeps up never has more than a step's worth


class Feed:
    """Filled by the session table on the loop, emptied by one task.

    A reader that lags gets fewer, larger deltas; one that lags by more than `ids_max` ids, none.
    """

    def __init__(self, ids_max: int) -> None:
        self._overflowed = False
        self._ids_max = ids_max
        self._events: list[Delta | SessionEnd] = []
        self._ids = 0
        self._merge_at = MERGE_AT
        self._waiter: asyncio.Future[None] | None = None

    def emit(self, event: SessionEvent) -> None:
        """Take one event; never blocks, never raises."""
        if isinstance(event, Opening):
            return
        if isinstance(event, Delta):
            self._ids += len(event.ids)
            if self._ids > self._ids_max:
                self._overflowed = True
                self._events.clear()
                self._wake()
                return
        self._events.append(event)
        if len(self._events) >= self._merge_at:
            self._events = merge(self._events)
            self._merge_at = max(MERGE_AT, 2 * len(self._events))
        self._wake()

    async def take(self, timeout_s: float) -> list[Delta | SessionEnd]:
        """Everything that waits; waits up to `timeout_s` for the first, [] when none came.

        Raises `Overloaded` once the reader has fallen too far behind.
        """
        if not self._events and not self._overflowed:
            await self._wait(timeout_s)
        if self._overflowed:
            raise Overloaded("The client reads too slowly.")
        events, self._events, self._ids = self._events, [], 0
        self._merge_at = MERGE_AT
        return events

    async def _wait(self, timeout_s: float) -> None:
        """A future and a timer: once a token, and a third of what `asyncio.timeout` costs."""
        assert self._waiter is None, "one reader"
        loop = asyncio.get_running_loop()
        self._waiter = loop.create_future()
        timer = loop.call_later(timeout_s, self._wake)
        try:
            await self._waiter
        finally:
            timer.cancel()
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(events: Sequence[E]) -> list[E]:
    """One delta per choice, then the rest: the same text, ids and logprobs in the same order."""
    by_choice: dict[int, list[Delta]] = {}
    rest: list[E] = []
    for event in events:
        if isinstance(event, Delta):
            by_choice.setdefault(event.choice, []).append(event)
        else:
            rest.append(event)
    merged: list[E] = [_joined(deltas) for deltas in by_choice.values()]
    return merged + rest


def _joined(deltas: list[Delta]) -> Delta:
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    return Delta(
        choice=last.choice,
        index=deltas[0].index,
        ids=[token for delta in deltas for token in delta.ids],
        text="".join(delta.text for delta in deltas),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=[token for delta in deltas for token in delta.logprobs or []]
        if has_logprobs
        else None,
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
