"""Responses and stored chats outlive the gateway that runs them, for the official client."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar

import aiohttp
import httpx2
import openai
import pytest
from openai.types.chat import ChatCompletionChunk
from openai.types.responses import Response

from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import Adopted, Output
from services.gateway.stored.store import Store, request_id_of
from shared.errors import NotFound
from shared.nats_bus import NatsBus
from tests.mesh.cluster import Mesh

T = TypeVar("T")

TOKENS = 150  # at 20 ms: three seconds, in which something can happen


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two gateways on one socket, before simulated workers that take their time."""
    options = ("gateway.replicas=2", "gpu_worker.replicas=2", "gpu_worker.sim.step_ms=20")
    with Mesh(tmp_path_factory.mktemp("responses"), "--engine", "sim", *options) as running:
        yield running


@pytest.fixture
async def store(mesh: Mesh) -> AsyncIterator[Store]:
    """The logs, as a gateway reads them."""
    launch = launched(mesh)
    bus = await NatsBus.connect(
        launch["nats_url"], launch["nats_user"], launch["nats_password"], name="test"
    )
    yield Store(bus, StoredConfig())
    await bus.close()


@pytest.fixture
async def gateways(mesh: Mesh) -> AsyncIterator[dict[str, int]]:
    """Name -> pid of those that run, known before it matters; afterwards all are there again."""
    before = await asyncio.to_thread(mesh.processes)
    yield {each["name"]: each["pid"] for each in before if each["name"].startswith("gateway")}
    await mesh.all_ready(sum(each["restarts"] for each in before) + 1)
    await mesh.quiet()


def launched(mesh: Mesh) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((mesh.run_dir / "launch" / "gateway-0.json").read_text())
    return found


def asked(mesh: Mesh, number: int) -> dict[str, Any]:
    return {
        "model": mesh.model,
        "input": f"Story number {number}.",
        "max_output_tokens": TOKENS,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }


async def kill_runner(gateways: dict[str, int], store: Store, request_id: str) -> None:
    """SIGKILL the gateway that runs the request now."""
    log = await store.look(request_id, "")
    os.kill(gateways[log.adopter.rpartition("-")[0]], signal.SIGKILL)


async def adoptions(store: Store, request_id: str) -> int:
    """How many gateways have run it."""
    events = await store.history(request_id, "")
    return sum(isinstance(event, Adopted) for event in events)


async def retried(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer of `ask`, asked again while its connection breaks."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await ask()
            except openai.APIConnectionError:
                await asyncio.sleep(0.05)


async def followed(mesh: Mesh, response_id: str, seen: list[Any]) -> None:
    """Add to `seen` what comes after it, to the end, over as many connections as it takes."""
    async with asyncio.timeout(60):
        while not seen or seen[-1].type not in ("response.completed", "response.incomplete"):
            try:
                async with mesh.client() as client:
                    after = {"starting_after": seen[-1].sequence_number} if seen else {}
                    async for event in await client.responses.retrieve(
                        response_id, stream=True, **after
                    ):
                        if event.type == "error":
                            break
                        seen.append(event)
            except (openai.APIConnectionError, httpx2.TransportError):
                await asyncio.sleep(0.05)


async def test_a_stream_survives_the_gateway_that_runs_it(
    mesh: Mesh, store: Store, gateways: dict[str, int]
) -> None:
    """SIGKILL it mid-answer: the client goes on elsewhere after the last event that it saw, has
    every sequence number once, and the text of the calm run. So has who reads it later.
    """
    async with mesh.client() as client:
        calm = await client.responses.create(**asked(mesh, 1))
    seen: list[Any] = []
    with contextlib.suppress(openai.APIConnectionError, httpx2.TransportError):
        async with mesh.client() as client:
            async for event in await client.responses.create(**asked(mesh, 1), stream=True):
                seen.append(event)
                if len(seen) == 12:
                    await kill_runner(gateways, store, request_id_in(seen))
    await followed(mesh, f"resp_{request_id_in(seen)}", seen)
    again: list[Any] = []
    await followed(mesh, f"resp_{request_id_in(seen)}", again)

    assert [event.sequence_number for event in seen] == [*range(len(seen))]
    text = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
    assert text == seen[-1].response.output_text == calm.output_text
    assert seen == again
    assert seen[-1].response.usage.output_tokens == TOKENS
    assert await adoptions(store, request_id_in(seen)) == 2, "the fault hit"


def request_id_in(seen: list[Any]) -> str:
    request_id: str = seen[0].response.id
    return request_id.removeprefix("resp_")


async def test_a_background_response_survives_the_gateway_that_runs_it(
    mesh: Mesh, store: Store, gateways: dict[str, int]
) -> None:
    """Polling finds the whole answer, whoever answers the poll."""

    async def poll() -> Response:
        async with mesh.client() as client:  # a new connection goes to whichever gateway takes it
            return await client.responses.retrieve(response.id)

    async with mesh.client() as client:
        calm = await client.responses.create(**asked(mesh, 2))
        response = await client.responses.create(**asked(mesh, 2), background=True)
    request_id = response.id.removeprefix("resp_")
    assert response.status == "queued"
    async with asyncio.timeout(60):
        while not (response := await poll()).output_text:
            pass
        await kill_runner(gateways, store, request_id)
        while response.status == "in_progress":
            response = await retried(poll)
    assert response.output_text == calm.output_text
    assert await adoptions(store, request_id) == 2, "the fault hit"


async def test_two_posts_of_one_key_while_their_gateway_dies(
    mesh: Mesh, store: Store, gateways: dict[str, int]
) -> None:
    """Both clients ask until they are answered: one response, one text."""
    key = f"key-{time.monotonic()}"
    request_id = request_id_of(bytes.fromhex(launched(mesh)["secret"]), "", key)

    async def post() -> Response:
        async with mesh.client() as client:
            return await client.responses.create(
                **asked(mesh, 3), extra_headers={"Idempotency-Key": key}
            )

    async with mesh.client() as client:
        calm = await client.responses.create(**asked(mesh, 3))
    posts = [asyncio.create_task(retried(post)) for _ in range(2)]
    async with asyncio.timeout(60):
        while not await has_output(store, request_id):
            await asyncio.sleep(0.05)
    await kill_runner(gateways, store, request_id)
    one, two = await asyncio.gather(*posts)
    assert one == two
    assert one.id == f"resp_{request_id}"
    assert one.output_text == calm.output_text
    assert await adoptions(store, request_id) == 2, "the fault hit"


async def has_output(store: Store, request_id: str) -> bool:
    try:
        events = await store.history(request_id, "")
    except NotFound:
        return False
    return any(isinstance(event, Output) for event in events)


async def test_a_stored_chat_goes_on_after_its_gateway(
    mesh: Mesh, store: Store, gateways: dict[str, int]
) -> None:
    """`Last-Event-ID` on a new connection: every event once, the text of the calm run."""
    body = {
        "model": mesh.model,
        "messages": [{"role": "user", "content": "Story number 4."}],
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "store": True,
    }
    calm = await mesh.post("/v1/chat/completions", body)
    events: list[tuple[str, str]] = []
    async with asyncio.timeout(60):
        while not events or events[-1][1] != "[DONE]":
            with contextlib.suppress(aiohttp.ClientError):
                async for event in chat_events(mesh, body, events):
                    events.append(event)
                    if len(events) == 10:
                        await kill_runner(gateways, store, events[0][0][9:41])
    numbers = [event_id.rpartition(".")[2] for event_id, _ in events]
    assert numbers == [str(number) for number in range(len(events))]
    chunks = [ChatCompletionChunk.model_validate_json(data) for _, data in events[:-1]]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == calm["choices"][0]["message"]["content"]
    assert await adoptions(store, events[0][0][9:41]) == 2, "the fault hit"


async def chat_events(
    mesh: Mesh, body: dict[str, Any], seen: list[tuple[str, str]]
) -> AsyncIterator[tuple[str, str]]:
    """(id, data) of each event that has an id, after those `seen`."""
    headers = {"Last-Event-ID": seen[-1][0]} if seen else {}
    asks = {} if seen else {"json": {**body, "stream": True}}
    url = f"{mesh.base_url}/v1/chat/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, headers=headers, **asks) as answer,
    ):
        assert answer.status == 200, await answer.read()
        event_id = ""
        async for line in answer.content:
            name, _, value = line.decode().strip().partition(": ")
            if name == "id":
                event_id = value
            elif name == "data" and event_id:
                yield event_id, value
                event_id = ""
