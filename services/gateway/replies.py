"""What every HTTP handler says, and knows of its request."""

import re

from aiohttp import web

from services.gateway.edge import Edge
from services.gateway.openai.answer import answer
from services.gateway.openai.chunks import ChunkWriter
from services.gateway.openai.errors import error_body
from services.gateway.openai.request import Checked
from services.gateway.openai.response_events import ResponseWriter
from services.gateway.sse import HEADERS, Source, Stream, Writer
from shared.errors import InvalidRequest, MeshError

REQUEST_ID = "X-Request-Id"
KV_POLICY = "X-Shoal-KV-Policy"  # there where the workers' caches do not keep everything
IDEMPOTENCY_KEY = "Idempotency-Key"
request_id = web.RequestKey("request_id", str)
tenant = web.RequestKey("tenant", str)
_KEY = re.compile(r"[!-~]{1,256}")


def json_response(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def error_response(error: MeshError) -> web.Response:
    """`error` in OpenAI's shape, with `Retry-After` where coming back makes sense."""
    response = json_response(error_body(error), error.status)
    if error.status in (429, 503):
        response.headers["Retry-After"] = str(max(1, round(error.retry_after_s or 1)))
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    if error.status == 408:
        response.force_close()
    return response


def idempotency_key(request: web.Request) -> str | None:
    """The client's name for what it asks; raises `InvalidRequest`."""
    key = request.headers.get(IDEMPOTENCY_KEY)
    if key is not None and not _KEY.fullmatch(key):
        raise InvalidRequest(
            f"'{IDEMPOTENCY_KEY}' must be 1 to 256 printable ASCII characters without spaces.",
            param=IDEMPOTENCY_KEY,
        )
    return key


async def writer(edge: Edge, checked: Checked, created: int) -> Writer:
    """How the answer of `checked` is written; raises `MeshError`."""
    if checked.endpoint == "responses":
        return ResponseWriter(checked, created)
    return ChunkWriter(checked, answer(checked, created, await edge.echoes(checked)))


def marks(request: web.Request, edge: Edge) -> dict[str, str]:
    """Headers that every answer has."""
    policy = edge.parts.table.leading.kv_policy
    return {REQUEST_ID: request[request_id]} | ({KV_POLICY: policy} if policy else {})


def stream(request: web.Request, edge: Edge, source: Source, writes: Writer) -> Stream:
    """A stream that has not begun, of what `writes` makes of `source`."""
    response = web.StreamResponse(headers={**HEADERS, **marks(request, edge)})
    return Stream(request, response, source, writes, edge.config, edge.meter)
