"""A stream of server-sent events: one socket write per wake-up, and no patience without bound."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

from aiohttp import web

from services.gateway.config import GatewayConfig
from services.gateway.events import Delta, SessionEnd
from services.gateway.meters import Meter
from services.gateway.stored.events import Shown
from shared.errors import MeshError, Overloaded

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",  # nginx would collect the stream
}
PING = b": ping\n\n"


class Source(Protocol):
    """The events of one request, for one reader; nothing follows a `SessionEnd`."""

    async def take(self, timeout_s: float) -> Sequence[Shown]:
        """What has happened since; [] when nothing did for `timeout_s`. Raises `MeshError`."""


class Writer(Protocol):
    """How one endpoint writes an answer."""

    def write(self, event: Shown) -> list[bytes]:
        """What a stream sends for `event`, in order."""

    def broken(self, error: MeshError) -> bytes:
        """What it sends when it ends before its request."""

    def body(self, events: list[Shown]) -> bytes:
        """The whole answer."""


async def whole(source: Source, writer: Writer, config: GatewayConfig) -> bytes:
    """The answer once it has ended; raises the session's `MeshError`."""
    events: list[Shown] = []
    while not (events and isinstance(events[-1], SessionEnd)):
        events += await source.take(config.ping_s)
    end = events[-1]
    if isinstance(end, SessionEnd) and end.error is not None:
        raise end.error
    return writer.body(events)


class Stream:
    """One answer on its way to one client."""

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        source: Source,
        writer: Writer,
        config: GatewayConfig,
        meter: Meter,
    ) -> None:
        self._request = request
        self.response = response
        self._source = source
        self._writer = writer
        self._config = config
        self._meter = meter
        self._skip = 0  # events that the client has already

    async def begin(self) -> None:
        """Run from the first id on, so that what fails until then is a real HTTP error; a first id
        that takes longer than `patience_s` gives that up. Raises `MeshError` until then, and
        `ConnectionError` when the client is gone or too slow.
        """
        events: list[Shown] = []
        loop = asyncio.get_running_loop()
        until = loop.time() + self._config.patience_s
        first = None
        while first is None and loop.time() < until:
            events += await self._source.take(until - loop.time())
            first = next((e for e in events if isinstance(e, Delta | SessionEnd)), None)
        if isinstance(first, SessionEnd) and first.error is not None:
            raise first.error
        await self._run(events)

    async def resume(self, skip: int) -> None:
        """Run from the beginning, without the first `skip` events. Raises as `begin`."""
        self._skip = skip
        await self._run(await self._source.take(self._config.patience_s))

    async def _run(self, events: Sequence[Shown]) -> None:
        """Stream to the end, `events` first."""
        with self._write_limit():
            await self.response.prepare(self._request)
        while True:
            await self._write(self.render(events))
            if events and isinstance(events[-1], SessionEnd):
                return
            try:
                events = await self._source.take(self._config.ping_s)
            except Overloaded as error:
                self._abort("overflow")
                raise ConnectionResetError(error.detail) from error
            except MeshError as error:
                await self._write(self._writer.broken(error))
                return

    def render(self, events: Sequence[Shown]) -> bytes:
        """What the client is told of `events`, in one piece."""
        if not events:
            return PING
        frames = [frame for event in events for frame in self._writer.write(event)]
        skipped = min(self._skip, len(frames))
        self._skip -= skipped
        return b"".join(frames[skipped:])

    async def _write(self, data: bytes) -> None:
        if data:
            with self._write_limit():
                await self.response.write(data)

    @contextlib.contextmanager
    def _write_limit(self) -> Iterator[None]:
        """A plain timer: once a token, and a fraction of what `asyncio.timeout` costs."""
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._config.write_timeout_s, self._abort, "write_timeout")
        try:
            yield
        finally:
            timer.cancel()

    def _abort(self, why: str) -> None:
        """Drop the connection without ceremony: what is buffered for it will never be read.

        A write that waits raises `ConnectionError`, and the handler is cancelled.
        """
        self._meter.cut(why)
        if self._request.transport is not None:
            self._request.transport.abort()
