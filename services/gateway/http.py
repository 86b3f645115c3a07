"""The HTTP edge: OpenAI's endpoints, health and metrics."""

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable

import aiohttp.http_parser
import msgspec
from aiohttp import web
from msgspec.structs import replace

from services.gateway.auth import bearer
from services.gateway.edge import Edge, new_request_id
from services.gateway.openai.chunks import LAST_EVENT_ID
from services.gateway.openai.errors import (
    BodyTimeout,
    MethodNotAllowed,
    PayloadTooLarge,
    UnknownModel,
)
from services.gateway.openai.tokens import (
    check_detokenize,
    check_tokenize,
    detokenize_body,
    tokenize_body,
)
from services.gateway.protocol import Protocol
from services.gateway.replies import (
    IDEMPOTENCY_KEY,
    REQUEST_ID,
    error_response,
    idempotency_key,
    json_response,
    marks,
    request_id,
    stream,
    tenant,
    writer,
)
from services.gateway.sse import whole
from services.gateway.stored_http import StoredHttp
from shared import metrics
from shared.errors import InvalidRequest, MeshError, NotFound, Unavailable
from shared.log import log

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = {"/health", "/ready", "/metrics"}
TIMEOUT = "X-Request-Timeout-Ms"
SEND_BUFFER = 256 << 10  # bytes the kernel holds for one slow reader; its own default is 4 MB
LINGER_S = 2.0  # for the rest of a body that was refused
_PRINTABLE = re.compile(r"[!-~]{1,128}")


class HttpEdge:
    """Serves `edge` on one listening socket until closed."""

    def __init__(self, edge: Edge) -> None:
        # The pure Python parser has known holes; it is what is left when the wheel did not fit.
        assert aiohttp.http_parser.HttpRequestParser is not aiohttp.http_parser.HttpRequestParserPy
        self._edge = edge
        self._config = edge.config
        self._stored = StoredHttp(edge)
        self._runner = web.AppRunner(
            self._app(),
            handler_cancellation=True,  # a client that goes away cancels its request
            shutdown_timeout=1.0,
        )
        self._listener: asyncio.Server | None = None
        self.port = 0
        self.requests = 0  # seen so far

    async def start(self, listen_fd: int | None) -> None:
        """Serve on the inherited socket, or bind host and port of the settings."""
        if listen_fd is not None:
            sock = socket.socket(fileno=listen_fd)
        else:
            sock = socket.create_server((self._config.host, self._config.port), backlog=1024)
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        self.port = sock.getsockname()[1]
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(self._connection, sock=sock)

    def _connection(self) -> Protocol:
        return Protocol(
            self._runner.server,
            lambda: self._edge.meter.responded(400),
            loop=asyncio.get_running_loop(),
            access_log=None,
            keepalive_timeout=self._config.header_timeout_s,  # also the bound on request headers
            lingering_time=min(LINGER_S, self._config.body_timeout_s),
        )

    @property
    def connections(self) -> int:
        """Open now; the next request may come on any of them."""
        return len(self._runner.server.connections) if self._runner.server is not None else 0

    async def stop_listening(self) -> None:
        """Take no new connection; those open go on."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    async def close(self) -> None:
        """Close every connection."""
        await self.stop_listening()
        await self._runner.cleanup()
        await self._stored.close()

    def _app(self) -> web.Application:
        app = web.Application(
            middlewares=[self._outer, self._auth], client_max_size=self._config.body_bytes_max
        )
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completions),
                web.post("/v1/responses", self._responses),
                *self._stored.routes(),
                web.get("/v1/models", self._models),
                web.get("/v1/models/{id:.+}", self._model),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                web.get("/health", self._health),
                web.get("/ready", self._ready),
                web.get("/metrics", self._metrics),
            ]
        )
        return app

    # --- middlewares ---

    @web.middleware
    async def _outer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Name the request, and turn whatever is raised into an answer of OpenAI's shape."""
        self.requests += 1
        given = request.headers.get(REQUEST_ID, "")
        request[request_id] = given if _PRINTABLE.fullmatch(given) else new_request_id()
        try:
            response = await handler(request)
        except MeshError as error:
            response = error_response(error)
        except web.HTTPException as error:
            response = error_response(_http_error(error, request))
        except (asyncio.CancelledError, ConnectionError):
            self._edge.meter.responded(499)
            raise
        except Exception as error:  # noqa: BLE001 our bug: say so in the log, not to the client
            log.error("request_failed", request_id=request[request_id], exc_info=error)
            response = error_response(MeshError("The server had an error. It has been logged."))
        self._edge.meter.responded(response.status)
        if not response.prepared:
            response.headers.update(marks(request, self._edge))
        if self._edge.draining:  # the next request of this client finds another gateway
            response.force_close()
        return response

    @web.middleware
    async def _auth(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Every path but health and metrics needs a key, also those that do not exist."""
        if request.path not in OPEN_PATHS:
            request[tenant] = self._edge.keys.tenant(bearer(request.headers.get("Authorization")))
        return await handler(request)

    # --- generation ---

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        if LAST_EVENT_ID in request.headers:
            await self._body(request)
            return await self._stored.resume_chat(request)
        return await self._generate(request, "chat")

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "completions")

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, "responses")

    async def _generate(self, request: web.Request, endpoint: str) -> web.StreamResponse:
        arrived = self._edge.parts.clock()
        body = await self._body(request)
        with self._edge.room(len(body)):
            return await self._answer(request, endpoint, body, arrived)

    async def _answer(
        self, request: web.Request, endpoint: str, body: bytes, arrived: float
    ) -> web.StreamResponse:
        edge, key = self._edge, idempotency_key(request)
        spent_s = edge.parts.clock() - arrived
        caller = edge.caller(request[tenant], request.headers.get(TIMEOUT), spent_s)
        if key is not None:
            caller = replace(caller, request_id=edge.stored_id(caller.tenant, key))
        async with edge.turn(len(body)):
            checked = edge.check(endpoint, body, caller)
        if checked.store:
            return await self._stored.submit(request, checked, body, keyed=key is not None)
        if key is not None:
            raise InvalidRequest(f"'{IDEMPOTENCY_KEY}' needs 'store'.", param=IDEMPOTENCY_KEY)
        with edge.open(checked) as asked:
            writes = await writer(edge, checked, asked.created)
            if not checked.stream:
                return json_response(await whole(asked.feed, writes, self._config))
            answer = stream(request, edge, asked.feed, writes)
            await answer.begin()
            return answer.response

    async def _body(self, request: web.Request) -> bytes:
        """The whole body, within bounds of size and time."""
        length = request.content_length
        if length is not None and length > self._config.body_bytes_max:
            raise self._too_large()
        try:
            async with asyncio.timeout(self._config.body_timeout_s):
                return await request.read()
        except TimeoutError:
            raise BodyTimeout(
                f"The body did not arrive within {self._config.body_timeout_s:g} s."
            ) from None
        except web.HTTPRequestEntityTooLarge:
            raise self._too_large() from None
        except web.RequestPayloadError as error:
            raise InvalidRequest("The body could not be read.") from error

    def _too_large(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"The body is over {self._config.body_bytes_max} bytes.")

    # --- models, tokens ---

    def _model_object(self) -> dict[str, object]:
        return {
            "id": self._edge.model,
            "object": "model",
            "created": self._edge.started,
            "owned_by": "shoal",
            "root": self._edge.model,
            "parent": None,
            "max_model_len": self._edge.parts.table.leading.max_model_len or None,
            "permission": [],
        }

    async def _models(self, _request: web.Request) -> web.Response:
        body = {"object": "list", "data": [self._model_object()]}
        return json_response(msgspec.json.encode(body))

    async def _model(self, request: web.Request) -> web.Response:
        if request.match_info["id"] != self._edge.model:
            raise UnknownModel(request.match_info["id"])
        return json_response(msgspec.json.encode(self._model_object()))

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        async with self._edge.turn(len(body)):
            asked = check_tokenize(body, self._edge.model)
        ids = await self._edge.tokenize(asked, request[tenant])
        return json_response(tokenize_body(ids, self._edge.parts.table.leading.max_model_len))

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        async with self._edge.turn(len(body)):
            ids = check_detokenize(body, self._edge.model)
        return json_response(detokenize_body(await self._edge.detokenize(ids)))

    # --- health ---

    async def _health(self, _request: web.Request) -> web.Response:
        """Live: the loop turns."""
        return json_response(b'{"status":"ok"}')

    async def _ready(self, _request: web.Request) -> web.Response:
        """Can serve now."""
        why = self._edge.not_ready()
        if why:
            raise Unavailable(f"Not ready: {why}.")
        return json_response(b'{"status":"ready"}')

    async def _metrics(self, _request: web.Request) -> web.Response:
        self._edge.measure()
        return web.Response(
            body=metrics.render(),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )


def _http_error(error: web.HTTPException, request: web.Request) -> MeshError:
    """What aiohttp itself refuses, as ours."""
    match error:
        case web.HTTPNotFound():
            return NotFound(f"There is no {request.method} {request.path}.")
        case web.HTTPMethodNotAllowed():
            return MethodNotAllowed(f"{request.method} is not allowed on {request.path}.")
        case web.HTTPRequestEntityTooLarge():
            return PayloadTooLarge("The request is too large.")
    kind = InvalidRequest if error.status < 500 else MeshError
    return kind(error.reason)
