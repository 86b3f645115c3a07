"""One reader of one log: the past by a read, then what the server says it has stored.

What is heard may be lost, so a missing sequence or a silence leads back to a read; nothing is
taken from it that has not been stored.
"""

import asyncio
from types import TracebackType

from services.gateway.stored.streams import LOGS
from shared.bus import Bus, Delivery, Subscription
from shared.errors import NotFound
from shared.jetstream import Entry, JetStream, heard
from shared.subjects import logged, stored

HEARD_MAX = 1024  # entries that a reader may lag behind before it reads them again


class Tail:
    """`async with Tail(...)`; each `next` is what follows."""

    def __init__(self, bus: Bus, jetstream: JetStream, request_id: str, poll_s: float) -> None:
        self._bus = bus
        self._jetstream = jetstream
        self._request_id = request_id
        self._poll_s = poll_s
        self._last = 0  # sequence of the last entry handed out
        self._heard: list[Entry] = []
        self._arrived = asyncio.Event()
        self._subscription: Subscription | None = None

    async def __aenter__(self) -> "Tail":
        self._subscription = await self._bus.subscribe(logged(self._request_id), self._on_heard)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._subscription is not None:
            await self._subscription.unsubscribe()

    async def next(self) -> list[Entry]:
        """What follows; [] when there was nothing for `poll_s`. Raises `NotFound` when there is no
        log, or no longer the one that was read so far, and `Unavailable`.
        """
        if self._last:
            await self._wait()
        heard, self._heard = self._heard, []
        self._arrived.clear()
        new = [entry for entry in heard if entry.seq > self._last]
        if not self._last or not new or not self._follow(new):
            new = await self._read()
        if new:
            self._last = new[-1].seq
        return new

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._poll_s):
                await self._arrived.wait()
        except TimeoutError:
            return

    def _follow(self, new: list[Entry]) -> bool:
        """Is nothing missing between what was handed out and `new`, nor in it?"""
        befores = [self._last, *(entry.seq for entry in new)]
        return all(entry.before == before for entry, before in zip(new, befores, strict=False))

    async def _read(self) -> list[Entry]:
        """From the last entry on, which has to be there still: a log may be deleted and begun
        again under the same name.
        """
        after = max(self._last - 1, 0)
        entries = await self._jetstream.read(LOGS, stored(self._request_id), after)
        if not entries or (self._last and entries[0].seq != self._last):
            raise NotFound(f"There is no stored request '{self._request_id}'.")
        return entries[1:] if self._last else entries

    def _on_heard(self, delivery: Delivery) -> None:
        if len(self._heard) >= HEARD_MAX:
            self._heard.clear()  # a hole: it will be read
        self._heard.append(heard(delivery))
        self._arrived.set()
