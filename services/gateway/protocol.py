"""A connection of aiohttp's, but for what it says of bytes that are no HTTP."""

from collections.abc import Callable
from typing import Any

from aiohttp import web

from services.gateway.replies import error_response
from shared.errors import InvalidRequest
from shared.log import log


class Protocol(web.RequestHandler):
    """Answers them in OpenAI's shape and closes; `refused` counts them."""

    __slots__ = ("_refused",)

    def __init__(self, server: Any, refused: Callable[[], None], **settings: Any) -> None:
        super().__init__(server, **settings)
        self._refused = refused

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Anything else than a parser's complaint is our bug, and logged as such."""
        if status >= 500 or request.writer.output_size > 0:
            return super().handle_error(request, status, exc, message)
        self._refused()
        log.info("not_http", why=type(exc).__name__)  # never what was sent: it may hold a key
        response = error_response(InvalidRequest("The request is not valid HTTP."))
        response.force_close()
        return response
