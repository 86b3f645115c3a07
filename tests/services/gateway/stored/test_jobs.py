"""Stored requests from outside, over the bus: two gateways on a real server, a plain account."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from deploy.servers import Server
from services.gateway.stored.events import Adopted, Submitted
from services.gateway.stored.streams import LOGS
from shared.bus import Delivery
from shared.client import Client, RequestFailed
from shared.nats_bus import NatsBus
from shared.subjects import JOBS, REPLAY, stored
from shared.testing import eventually
from tests.services.gateway.fake_mesh import MODEL
from tests.services.gateway.stored.duo import TEXT, Duo, chat, duo, texts, whole
from tests.services.gateway.stored.kit import R

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def pair(nats_server: Server) -> AsyncIterator[Duo]:
    async with duo(nats_server, api_keys={"key-a": "t", "key-b": "u"}) as running:
        yield running


@pytest.fixture
async def bus(nats_server: Server) -> AsyncIterator[NatsBus]:
    """Of an outsider."""
    bus = await NatsBus.connect(
        nats_server.url, nats_server.public_user, nats_server.public_password, name="outside"
    )
    yield bus
    await bus.close()


def client(bus: NatsBus, key: str = "key-a") -> Client:
    return Client(bus, model=MODEL, api_key=key)


async def text(client: Client, request_id: str) -> str:
    chunks = [chunk async for chunk in client.follow(request_id)]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


async def test_a_job_is_followed_by_any_number_of_readers(pair: Duo, bus: NatsBus) -> None:
    """Before, while and after it runs, each gets the same chunks."""
    pair.mesh.script.stuck_after = 2
    request_id = await client(bus).submit(messages=MESSAGES)
    early = [asyncio.create_task(text(client(bus), request_id)) for _ in range(4)]
    await pair.under_way(request_id)
    pair.mesh.script.stuck_after = None
    assert await asyncio.gather(*early) == [TEXT] * 4
    assert await text(client(bus), request_id) == TEXT
    assert len(pair.mesh.submitted) == 1


async def test_the_same_key_is_the_same_request(pair: Duo, bus: NatsBus) -> None:
    """Eight at once and one later: one id, run once. Another body under the key is refused, the
    same key of another tenant is another request.
    """
    submits = [client(bus).submit(messages=MESSAGES, key="k") for _ in range(8)]
    names = set(await asyncio.gather(*submits))
    assert len(names) == 1
    [name] = names
    assert await text(client(bus), name) == TEXT
    assert await client(bus).submit(messages=MESSAGES, key="k") == name
    assert len(pair.mesh.submitted) == 1
    with pytest.raises(RequestFailed) as refused:
        await client(bus).submit(messages=MESSAGES, key="k", max_tokens=3)
    assert refused.value.openai_code == "idempotency_key_reused"
    assert await client(bus, "key-b").submit(messages=MESSAGES, key="k") != name
    with pytest.raises(RequestFailed):
        await text(client(bus, "key-b"), name)


async def test_no_key_of_a_client_is_kept(pair: Duo, bus: NatsBus) -> None:
    """Neither an API key nor an idempotency key is in the log."""
    request_id = await client(bus).submit(messages=MESSAGES, key="idem-secret")
    entries = await pair.store.jetstream.read(LOGS, stored(request_id))
    whole = b"".join(entry.payload for entry in entries)
    assert b"key-a" not in whole
    assert b"idem-secret" not in whole


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "x" * 257}, "idempotency_key"),
        ({"endpoint": "responses"}, "endpoint"),
        ({"temperature": 9}, "temperature"),
        ({"messages": []}, "messages"),
        ({"timeout_ms": 0}, None),
    ],
)
async def test_a_bad_job_is_refused_at_once(
    pair: Duo, bus: NatsBus, fields: dict[str, Any], param: str | None
) -> None:
    """What could not run is not stored."""
    frames: list[Any] = []
    await bus.subscribe("_INBOX.bad", lambda d: frames.append(json.loads(d.payload)))
    body = {"model": MODEL, "messages": MESSAGES, "api_key": "key-a", **fields}
    bus.publish(JOBS, json.dumps(body).encode(), "_INBOX.bad")
    await eventually(lambda: len(frames) == 2)
    assert frames[0]["data"]["error"]["type"] == "invalid_request_error"
    assert frames[0]["data"]["error"]["param"] == param
    assert (await pair.store.jetstream.usage(LOGS)).messages == 0


async def test_a_submission_is_answered_with_one_frame(pair: Duo, bus: NatsBus) -> None:
    """JSON in, JSON out: its id and how it stands."""
    frames: list[Any] = []
    await bus.subscribe("_INBOX.job", lambda d: frames.append(json.loads(d.payload)))
    body = {"model": MODEL, "messages": MESSAGES, "api_key": "key-a", "idempotency_key": "k"}
    for count, status in ((1, "queued"), (2, "completed")):
        bus.publish(JOBS, json.dumps(body).encode(), "_INBOX.job")
        await eventually(lambda count=count: len(frames) == count)  # type: ignore[misc]
        told = frames[-1]
        assert (told["event"], told["index"], told["data"]["status"]) == ("job", 0, status)
        assert told["data"]["id"] == told["request_id"]
        assert await text(client(bus), told["request_id"]) == TEXT


async def test_a_reader_outlives_the_gateway_that_runs_it(pair: Duo, bus: NatsBus) -> None:
    """It stops in the middle: another runs the request, and the reader has every chunk once."""
    pair.mesh.script.stuck_after = 2
    request_id = await client(bus).submit(messages=MESSAGES)
    reader = asyncio.create_task(text(client(bus), request_id))
    first = await pair.under_way(request_id)
    first.stop()
    await eventually(lambda: len(pair.mesh.submitted) == 2, 15.0)
    pair.mesh.script.stuck_after = None
    assert await reader == TEXT
    log = [logged.event async for logged in pair.gateways[1].store.follow(request_id, "t")]
    assert len({event.gateway for event in log if isinstance(event, Adopted)}) == 2


async def test_a_plain_request_is_replayed_through_any_gateway(pair: Duo, bus: NatsBus) -> None:
    """The gateway that is asked need not be the one that has the frames."""
    asked = client(bus)
    for _ in range(6):
        stream = asked.chat(messages=MESSAGES)
        chunks = [chunk async for chunk in stream]
        request_id = chunks[0]["id"].removeprefix("chatcmpl-")
        assert [chunk async for chunk in asked.follow(request_id)] == chunks
    assert all(g.stats().get("handled", 0) for g in pair.gateways)


async def test_a_lost_answer_to_a_submission_is_asked_for_again(
    pair: Duo, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client cannot know whether it was taken; it submits again, and it runs once."""
    monkeypatch.setattr("shared.client.SUBMIT_S", 0.5)
    lost: list[Delivery] = []
    subscribe = bus.subscribe

    async def losing(subject: str, handler: Any, queue: str = "") -> Any:
        return await subscribe(subject, handler if lost else lost.append, queue)

    monkeypatch.setattr(bus, "subscribe", losing)
    request_id = await client(bus).submit(messages=MESSAGES)
    assert msgspec.msgpack.decode(lost[0].payload)["request_id"] == request_id
    assert await text(client(bus), request_id) == TEXT
    assert len(pair.mesh.submitted) == 1
    [submitted] = [
        logged.event
        async for logged in pair.store.follow(request_id, "t")
        if isinstance(logged.event, Submitted)
    ]
    assert submitted.endpoint == "chat"


async def test_a_reader_that_asks_again_is_answered_once(pair: Duo, bus: NatsBus) -> None:
    """Each question takes the place of the one before, at whatever gateway it was asked: what
    comes after the last comes at most once from each.
    """
    pair.mesh.script.stuck_after = 2
    request_id = await client(bus).submit(messages=MESSAGES)
    await pair.under_way(request_id)
    frames: list[int] = []
    await bus.subscribe("_INBOX.again", lambda d: d.payload and frames.append(index_of(d)))
    asked = json.dumps({"request_id": request_id, "api_key": "key-a", "from": 0}).encode()
    for count in range(1, 11):
        bus.publish(REPLAY, asked, "_INBOX.again")
        await eventually(lambda count=count: frames.count(0) == count)  # type: ignore[misc]
    pair.mesh.script.stuck_after = None
    last = len(await whole_of(bus, request_id)) - 1
    await eventually(lambda: last in frames)
    await bus.flush()
    assert 1 <= frames.count(last) <= len(pair.gateways)


def index_of(delivery: Delivery) -> int:
    return int(json.loads(delivery.payload)["index"])


async def whole_of(bus: NatsBus, request_id: str) -> list[Any]:
    """Every frame of a request: its chunks and `done`."""
    return [*[chunk async for chunk in client(bus).follow(request_id)], None]


async def test_what_is_not_for_the_bus_is_refused(pair: Duo, bus: NatsBus) -> None:
    """A response of the Responses API is read over HTTP: its events are no chunks."""
    asked = replace(chat(), endpoint="responses", body=b'{"model":"tiny","input":"Hi"}')
    await pair.ask(asked)
    with pytest.raises(RequestFailed) as refused:
        await text(client(bus), R)
    assert refused.value.param == "request_id"
    assert texts(await whole(pair)) == {0: TEXT}
