"""The bus edge: plain clients that publish a body with an inbox and read frames."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from services.gateway.edge import LARGE
from shared.bus import Delivery
from shared.client import Client, FramesLost, RequestFailed
from shared.errors import DeadlineExceeded, Unavailable
from shared.publish import is_inbox
from shared.subjects import GENERATE
from shared.testing import MemoryBroker, MemoryBus, eventually
from tests.services.gateway.fake_mesh import Front, front

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
INBOX = "_INBOX.me"


@pytest.fixture
async def edge() -> AsyncIterator[Front]:
    async with front(ping_bus_s=0.05, probe_timeout_s=0.05) as running:
        yield running


class Outsider:
    """Publishes to the public subject and collects what comes to its inbox."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.bus = MemoryBus(broker)
        self.frames: list[Any] = []
        self.probes: list[Delivery] = []
        self.decode: Any = json.loads

    async def ask(self, body: bytes, reply: str = INBOX) -> None:
        self.subscription = await self.bus.subscribe(reply, self._hear)
        self.bus.publish(GENERATE, body, reply)

    def _hear(self, delivery: Delivery) -> None:
        if delivery.payload:
            self.frames.append(self.decode(delivery.payload))
        else:
            self.probes.append(delivery)

    async def done(self) -> None:
        await eventually(lambda: bool(self.frames) and self.frames[-1]["event"] == "done")


@pytest.fixture
def outsider(edge: Front) -> Outsider:
    return Outsider(edge.broker)


async def test_json_in_numbered_frames_out(edge: Front, outsider: Outsider) -> None:
    """A JSON body streams numbered frames of one request, chunks of OpenAI's, and `done` last."""
    await outsider.ask(json.dumps(CHAT).encode())
    await outsider.done()

    frames = outsider.frames
    assert [frame["index"] for frame in frames] == list(range(len(frames)))
    assert [frame["event"] for frame in frames] == ["chunk"] * (len(frames) - 1) + ["done"]
    (request_id,) = {frame["request_id"] for frame in frames}
    chunks = [frame["data"] for frame in frames[:-1]]
    assert chunks[0]["id"] == f"chatcmpl-{request_id}"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == "Hello, world!"


async def test_messagepack_in_messagepack_out(edge: Front, outsider: Outsider) -> None:
    """A MessagePack body is answered in MessagePack; `stream: false` is one frame and `done`."""
    outsider.decode = msgspec.msgpack.decode
    body = {"endpoint": "completions", "prompt": [72, 105], "stream": False}
    await outsider.ask(msgspec.msgpack.encode(body))
    await outsider.done()

    answer, done = outsider.frames
    assert answer["data"]["choices"][0]["text"] == "Hello, world!"
    assert (done["index"], done["data"]) == (1, None)


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", None),
        (b"", None),
        (b"\x00", None),
        (b"\xc1", None),
        (b'{"endpoint": "images"}', None),
        (b'{"messages": []}', None),
        (b'{"messages": [{"role": "user", "content": "x"}], "model": "x"}', "model_not_found"),
        (b'{"timeout_ms": 0, "messages": [{"role": "user", "content": "x"}]}', None),
    ],
)
async def test_bad_submissions_are_answered(
    edge: Front, outsider: Outsider, body: bytes, code: str | None
) -> None:
    """What cannot be served is an error frame in OpenAI's shape, then `done`."""
    if body[:1] >= b"\x80":
        outsider.decode = msgspec.msgpack.decode
    await outsider.ask(body)
    await outsider.done()

    error, _ = outsider.frames
    assert error["event"] == "error"
    assert error["data"]["error"]["type"] == "invalid_request_error"
    assert error["data"]["error"]["code"] == code


async def test_a_failure_in_the_middle_is_an_error_frame(edge: Front, outsider: Outsider) -> None:
    """A session that fails after some ids ends with its typed error."""
    edge.mesh.script.fails, edge.mesh.script.fails_after = ("internal", "NaN"), 2
    await outsider.ask(json.dumps(CHAT).encode())
    await outsider.done()

    assert outsider.frames[-2]["data"]["error"]["type"] == "server_error"
    assert outsider.frames[-3]["event"] == "chunk"


async def test_an_inbox_where_nobody_listens_cancels(edge: Front, outsider: Outsider) -> None:
    """Two probes with nobody there cancel the request."""
    edge.mesh.script.stuck_after = 2
    await outsider.ask(json.dumps(CHAT).encode())
    await eventually(lambda: len(outsider.frames) >= 2)
    assert edge.mesh.cancelled == []
    await outsider.subscription.unsubscribe()

    await eventually(lambda: len(edge.mesh.cancelled) >= 1, what="Cancel seen")
    await edge.quiet()


async def test_a_silent_listener_is_not_cancelled(edge: Front, outsider: Outsider) -> None:
    """A client that hears the probes need not answer them."""
    edge.mesh.script.stuck_after = 2
    await outsider.ask(json.dumps(CHAT).encode())
    await eventually(lambda: len(outsider.probes) >= 4)
    edge.mesh.script.stuck_after = None
    await outsider.done()

    assert edge.mesh.cancelled == []


async def test_answers_go_to_inboxes_only(edge: Front, outsider: Outsider) -> None:
    """A reply subject that is no inbox gets nothing: an answer there could do harm."""
    for reply in ("mesh.v1.died", "shoal.v1.generate2", ""):
        await outsider.bus.subscribe("mesh.v1.died", outsider._hear)
        outsider.bus.publish(GENERATE, json.dumps(CHAT).encode(), reply)
    await outsider.ask(json.dumps(CHAT).encode())
    await outsider.done()

    assert len({frame["request_id"] for frame in outsider.frames}) == 1
    assert len(edge.mesh.generated) == 1


@pytest.mark.parametrize(
    "reply",
    ["", "mesh.v1.died", "_INBOX", "_INBOX.", "_INBOX.>", "_INBOX.*", "_INBOX.a..b", "_INBOX.a b",
     "_INBOX.\u00e9", "_INBOX.a\r\nPUB x", "_INBOX." + "a" * 600, "x_INBOX.a", "_INBOXa"],
)  # fmt: skip
def test_what_is_no_inbox(reply: str) -> None:
    """NATS passes on replies that it would not take as a subject; nothing is tried with them."""
    assert not is_inbox(reply)
    assert is_inbox("_INBOX.a")
    assert is_inbox("_INBOX.Xy_-1.2")


async def test_keys_guard_the_bus_too() -> None:
    """With keys configured a submission needs one, and acts as its tenant."""
    async with front(api_keys={"sk-a": "alice"}) as edge:
        outsider = Outsider(edge.broker)
        await outsider.ask(json.dumps(CHAT).encode())
        await outsider.done()
        assert outsider.frames[0]["data"]["error"]["code"] == "invalid_api_key"
        client = Client(MemoryBus(edge.broker), api_key="sk-a")
        assert [chunk async for chunk in client.chat(messages=CHAT["messages"])]
        assert edge.mesh.submitted[0].tenant == "alice"


# --- the client library ---


@pytest.fixture
def client(edge: Front) -> Client:
    return Client(MemoryBus(edge.broker), model="tiny")


async def test_the_client_streams_and_answers_whole(edge: Front, client: Client) -> None:
    """Chunks of a chat, of a completion, and a whole answer."""
    chat = [chunk async for chunk in client.chat(messages=CHAT["messages"])]
    completion = [chunk async for chunk in client.complete(prompt="x", max_tokens=2)]
    whole = await client.whole("chat", messages=CHAT["messages"])

    told = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chat)
    assert told == whole["choices"][0]["message"]["content"] == "Hello, world!"
    assert "".join(chunk["choices"][0]["text"] for chunk in completion) == "Hello"
    assert not [s for s in edge.broker.subscriptions if s.pattern.startswith("_INBOX")]


async def test_the_client_raises_what_the_mesh_says(client: Client) -> None:
    """An error frame is raised with message, param and code."""
    with pytest.raises(RequestFailed) as caught:
        await client.whole("chat", messages=CHAT["messages"], temperature=9)
    assert caught.value.param == "temperature"


async def test_the_clients_time_is_the_requests_time(edge: Front, client: Client) -> None:
    """`timeout_s` is the deadline in the mesh, whose word ends the stream."""
    edge.mesh.script.stuck_after = 0
    with pytest.raises(RequestFailed) as caught:
        await client.whole("chat", messages=CHAT["messages"], timeout_s=0.1)
    assert caught.value.openai_code == "deadline_exceeded"


async def test_leaving_the_loop_cancels(edge: Front, client: Client) -> None:
    """A reader that stops in the middle leaves nothing running."""
    edge.mesh.script.stuck_after = 2
    stream = client.chat(messages=CHAT["messages"])
    await anext(stream)
    await stream.aclose()

    await eventually(lambda: len(edge.mesh.cancelled) >= 1, what="Cancel seen")
    await edge.quiet()


class Played:
    """A gateway that sends what a test wants."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)

    async def plays(self, *frames: tuple[int, str]) -> Client:
        def answer(delivery: Delivery) -> None:
            for index, event in frames:
                frame = {"request_id": "r", "index": index, "event": event, "data": {"i": index}}
                self.bus.publish(delivery.reply, msgspec.msgpack.encode(frame))

        await self.bus.subscribe(GENERATE, answer)
        return Client(MemoryBus(self.broker))


async def test_a_frame_that_never_comes_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap is never skipped: what came before it is given, and when nobody has the rest, the
    error.
    """
    monkeypatch.setattr("shared.client.GAP_S", 0.001)
    monkeypatch.setattr("shared.client.GAP_MAX_S", 0.01)
    client = await Played().plays((0, "chunk"), (1, "chunk"), (3, "chunk"), (4, "done"))
    stream = client.chat()

    assert [(await anext(stream))["i"], (await anext(stream))["i"]] == [0, 1]
    with pytest.raises(FramesLost, match="Frame 2 is missing"):
        await anext(stream)


async def test_a_repeated_frame_is_dropped() -> None:
    """A duplicate of the bus is read once."""
    client = await Played().plays((0, "chunk"), (0, "chunk"), (1, "chunk"), (2, "done"))
    assert [chunk["i"] async for chunk in client.chat()] == [0, 1]


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's word that nobody serves, a silence, and a deadline are different errors."""
    played = Played()

    def refuse(delivery: Delivery) -> None:
        played.bus.publish(delivery.reply, b"")

    subscription = await played.bus.subscribe(GENERATE, refuse)
    with pytest.raises(Unavailable, match="Nobody serves"):
        await Client(MemoryBus(played.broker)).whole("chat")
    await subscription.unsubscribe()
    monkeypatch.setattr("shared.client.SILENCE_S", 0.05)
    with pytest.raises(Unavailable, match="silent"):
        await Client(MemoryBus(played.broker)).whole("chat")
    monkeypatch.setattr("shared.client.GRACE_S", 0.0)
    with pytest.raises(DeadlineExceeded):
        await Client(MemoryBus(played.broker)).whole("chat", timeout_s=0.01)


async def test_a_drain_serves_what_was_submitted() -> None:
    """Also a submission that waits for its turn; a later one finds nobody."""
    large = json.dumps(CHAT).encode() + b" " * LARGE
    async with front(drain_s=600.0) as edge:
        outsider = Outsider(edge.broker)
        async with edge.gateway.edge.turn(LARGE):
            await outsider.ask(large)
            edge.gateway.stop()
            await eventually(lambda: edge.gateway.edge.draining)
            for _ in range(100):  # turns of the loop, in which it must not come to its end
                await asyncio.sleep(0)
        await outsider.done()
        assert outsider.frames[0]["event"] == "chunk", outsider.frames
        await eventually(lambda: not edge.gateway.ready)
        with pytest.raises(Unavailable):
            await outsider.bus.request(GENERATE, large, 1.0)
