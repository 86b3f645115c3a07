"""The log of a stored request as a stream takes it: what is not taken yet stays in the log."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from services.gateway.stored.events import Shown, shown
from services.gateway.stored.store import Logged
from shared.errors import MeshError


class LogFeed:
    """Emptied by one task, which closes it."""

    def __init__(self, log: AsyncGenerator[Logged]) -> None:
        self._log = log
        self._next: asyncio.Future[Logged] | None = None
        self._failed: asyncio.Future[MeshError] = asyncio.get_running_loop().create_future()

    async def take(self, timeout_s: float) -> Sequence[Shown]:
        """What follows in the log; waits up to `timeout_s` for it, [] when nothing came. Raises
        what reading the log raises, or what `fail` was told.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s
        while True:
            if self._next is None:
                self._next = asyncio.ensure_future(anext(self._log))
            wait_s = max(until - loop.time(), 0.0)
            waits_for = (self._next, self._failed)
            await asyncio.wait(waits_for, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                raise self._failed.result()
            if not self._next.done():
                return []
            told, self._next = self._next, None
            events = shown(told.result().event)
            if events:
                return events

    def fail(self, error: MeshError) -> None:
        """Its reader is told `error`; the request goes on."""
        if not self._failed.done():
            self._failed.set_result(error)

    async def close(self) -> None:
        """Stop reading."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
        await self._log.aclose()
