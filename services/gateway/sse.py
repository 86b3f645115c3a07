"""A stream of server-sent events: one socket write per wake-up, and no patience without bound."""

import asyncio
import contextlib
from collections.abc import Iterator

from aiohttp import web

from services.gateway.config import GatewayConfig
from services.gateway.edge import Open
from services.gateway.events import Delta, SessionEnd
from services.gateway.openai.answer import Answer
from services.gateway.openai.errors import error_body
from shared.errors import Overloaded

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",  # nginx would collect the stream
}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class Stream:
    """One answer on its way. Nothing is sent before the first id, so that what fails until then
    is a real HTTP error; a first id that takes longer than `patience_s` gives that up.
    """

    def __init__(
        self,
        request: web.Request,
        headers: dict[str, str],
        asked: Open,
        answer: Answer,
        config: GatewayConfig,
    ) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**HEADERS, **headers})
        self._open = asked
        self._answer = answer
        self._config = config

    async def run(self) -> web.StreamResponse:
        """Stream to the end. Raises the session's `MeshError` while that can still be a status,
        `ConnectionError` when the client is gone or too slow.
        """
        events = await self._open.feed.take(self._config.patience_s)
        first = events[0] if events else None
        if isinstance(first, SessionEnd) and first.error is not None:
            raise first.error
        await self._prepare()
        while True:
            data, ended = self.render(events)
            await self._write(data)
            if ended:
                return self._response
            try:
                events = await self._open.feed.take(self._config.ping_s)
            except Overloaded as error:
                self._abort("overflow")
                raise ConnectionResetError(error.detail) from error

    def render(self, events: list[Delta | SessionEnd]) -> tuple[bytes, bool]:
        """What the client is told of `events`, in one piece, and whether that is all."""
        if not events:
            return PING, False
        parts: list[bytes] = []
        for event in events:
            if isinstance(event, Delta):
                parts += [b"data: %b\n\n" % chunk for chunk in self._answer.chunks(event)]
                continue
            if event.error is not None:
                parts.append(b"data: %b\n\n" % error_body(event.error))
            elif self._open.checked.include_usage:
                parts.append(b"data: %b\n\n" % self._answer.usage_chunk(event))
            parts.append(DONE)
            return b"".join(parts), True
        return b"".join(parts), False

    async def _prepare(self) -> None:
        with self._write_limit():
            await self._response.prepare(self._request)

    async def _write(self, data: bytes) -> None:
        if data:
            with self._write_limit():
                await self._response.write(data)

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
        self._open.meter.cut(why)
        if self._request.transport is not None:
            self._request.transport.abort()
