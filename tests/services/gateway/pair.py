"""Two gateways on a real JetStream, over HTTP, and what tests ask of them."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
from openai.types.responses import Response

from services.gateway.stored.config import StoredConfig
from shared.testing import eventually
from tests.services.gateway.fake_mesh import MODEL
from tests.services.gateway.stored.duo import Duo

ASK: dict[str, Any] = {"model": MODEL, "input": "Hi"}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}
CHATS = "/v1/chat/completions"
RESPONSES = "/v1/responses"
UNKNOWN = "resp_" + "0" * 32
STORED = StoredConfig(poll_s=0.2, pull_s=0.5, append_timeout_s=10.0)  # a busy machine is no outage


class Pair:
    """Two gateways, and a client of each."""

    def __init__(self, duo: Duo) -> None:
        self.duo = duo
        self.mesh = duo.mesh
        self.script = duo.mesh.script
        self.urls = [f"http://127.0.0.1:{gateway.http.port}" for gateway in duo.gateways]

    def client(self, number: int = 0, api_key: str = "none") -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.urls[number]}/v1", api_key=api_key, max_retries=0, timeout=60
        )

    async def call(
        self, path: str, body: Any = None, number: int = 0, method: str = "POST", **headers: str
    ) -> tuple[int, bytes, Any]:
        """(status, body, headers); `_` in the name of a header is `-`."""
        data = None if body is None else json.dumps(body).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, self.urls[number] + path, data=data, headers=named) as answer,
        ):
            return answer.status, await answer.read(), answer.headers

    async def quiet(self) -> None:
        """Nothing runs and nobody reads."""
        for gateway in self.duo.gateways:
            await eventually(lambda g=gateway: g.edge.idle.is_set() and not g.executor.running)  # type: ignore[misc]
            await eventually(lambda g=gateway: g.table.num_sessions == 0)  # type: ignore[misc]


async def settled(client: openai.AsyncOpenAI, response_id: str) -> Response:
    """Poll it until it has ended."""
    async with asyncio.timeout(20):
        while True:
            response = await client.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.02)


async def until_stuck(stream: Any) -> list[Any]:
    """The events of a response until its text is what `stuck_after = 2` lets out."""
    seen, text = [], ""
    async with asyncio.timeout(60):
        async for event in stream:
            seen.append(event)
            text += event.delta if event.type == "response.output_text.delta" else ""
            if text == "Hello":
                break
    return seen


def sse(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream; `data` is decoded unless it is [DONE]."""
    events = []
    for block in body.decode().split("\n\n")[:-1]:
        if block.startswith(":"):
            continue
        event: dict[str, Any] = dict(line.split(": ", 1) for line in block.split("\n"))
        if event["data"] != "[DONE]":
            event["data"] = json.loads(event["data"])
        events.append(event)
    return events


def said(events: list[dict[str, Any]]) -> str:
    """The text of the chunks of a chat."""
    chunks = [event["data"] for event in events if event["data"] != "[DONE]"]
    return "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])


Clients = list[openai.AsyncOpenAI]
