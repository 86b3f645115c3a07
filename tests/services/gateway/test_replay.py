"""Frames that were lost are sent again: from a live request, from one that has just ended."""

import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from services.gateway.frames import Frames, Kept
from shared.bus import Delivery, Handler
from shared.client import ASKS_MAX, Client, RequestFailed
from shared.subjects import GENERATE, REPLAY
from shared.testing import MemoryBroker, MemoryBus, MemorySubscription, eventually
from tests.services.gateway.fake_mesh import Front, front

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
DICE = random.Random(1)  # no pattern that a repeated burst of frames could fall in step with
KEYS = {"key-a": "a", "key-b": "b"}


class LossyBus(MemoryBus):
    """A client's bus on which the deliveries to its inboxes that `loses` names are lost."""

    def __init__(self, broker: MemoryBroker, loses: Callable[[int], bool]) -> None:
        super().__init__(broker)
        self.loses = loses
        self.seen = self.lost = 0

    async def subscribe(
        self, subject: str, handler: Handler, queue: str = ""
    ) -> MemorySubscription:
        def take(delivery: Delivery) -> None:
            self.seen += 1
            if self.loses(self.seen):
                self.lost += 1
            else:
                handler(delivery)

        return await super().subscribe(subject, take, queue)


@pytest.fixture
async def edge() -> AsyncIterator[Front]:
    async with front(ping_bus_s=0.05, probe_timeout_s=0.05) as running:
        running.mesh.script.pieces = [f"{number} " for number in range(60)]
        yield running


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shared.client.GAP_S", 0.005)
    monkeypatch.setattr("shared.client.REPAIR_S", 0.2)


async def text(client: Client) -> str:
    chunks = [c async for c in client.chat(messages=CHAT["messages"], max_tokens=100)]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "loses",
    [
        pytest.param(lambda _: DICE.random() < 0.3, id="a third"),
        pytest.param(lambda n: n in (2, 3, 4), id="the beginning"),
        pytest.param(lambda n: 30 < n < 90, id="much of it"),
        pytest.param(lambda n: n == 1, id="the first"),
    ],
)
async def test_a_client_gets_what_was_lost(edge: Front, loses: Callable[[int], bool]) -> None:
    """Whichever frames do not arrive, the text is whole, and nothing is generated twice."""
    bus = LossyBus(edge.broker, loses)
    assert await text(Client(bus, model="tiny")) == "".join(edge.mesh.script.pieces)
    assert bus.lost >= 1
    assert len(edge.mesh.submitted) == 1


@pytest.mark.usefixtures("quick")
async def test_a_client_gets_the_end_that_was_lost(edge: Front) -> None:
    """Nothing follows the last frame, so a silence is what tells that it is missing."""
    bus = LossyBus(edge.broker, lambda n: 50 < n <= 63)
    assert await text(Client(bus, model="tiny")) == "".join(edge.mesh.script.pieces)
    assert bus.lost >= 10


class Asking:
    """An outsider that replays by hand."""

    def __init__(self, edge: Front) -> None:
        self.bus = MemoryBus(edge.broker)
        self.frames: list[Any] = []

    async def ask(self, subject: str, inbox: str, **fields: Any) -> None:
        await self.bus.subscribe(inbox, self._hear)
        self.bus.publish(subject, json.dumps(fields).encode(), inbox)

    def _hear(self, delivery: Delivery) -> None:
        if delivery.payload:
            self.frames.append(json.loads(delivery.payload))

    async def done(self) -> list[Any]:
        await eventually(lambda: bool(self.frames) and self.frames[-1]["event"] == "done")
        return self.frames


async def test_a_reader_moves_to_another_inbox(edge: Front) -> None:
    """From the number it names on: what was sent before, then what is sent from now on."""
    edge.mesh.script.stuck_after = 5
    first, second = Asking(edge), Asking(edge)
    await first.ask(GENERATE, "_INBOX.one", **CHAT)
    await eventually(lambda: len(first.frames) >= 4)
    request_id = first.frames[0]["request_id"]
    await second.ask(REPLAY, "_INBOX.two", request_id=request_id, **{"from": 2})
    await eventually(lambda: len(second.frames) >= 2)
    edge.mesh.script.stuck_after = None
    frames = await second.done()
    assert [frame["index"] for frame in frames] == list(range(2, 2 + len(frames)))
    assert len(first.frames) < len(frames)
    again = Asking(edge)
    await again.ask(REPLAY, "_INBOX.three", request_id=request_id, **{"from": 0})
    assert (await again.done())[2:] == frames
    assert edge.mesh.cancelled == []


@pytest.mark.parametrize(
    "fields",
    [
        {"request_id": "x"},
        {"request_id": "0" * 32, "from": -1},
        {"request_id": "0" * 32, "from": 2**63},
        {},
        {"request_id": "0" * 32, "from": "1"},
    ],
)
async def test_a_bad_replay_is_answered(edge: Front, fields: dict[str, Any]) -> None:
    asking = Asking(edge)
    await asking.ask(REPLAY, "_INBOX.one", **fields)
    error = (await asking.done())[0]["data"]["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] in ("request_id", "from")


async def test_what_nobody_has_is_not_found(edge: Front) -> None:
    """Without a log that could be asked either, it says that it cannot tell."""
    asking = Asking(edge)
    await asking.ask(REPLAY, "_INBOX.one", request_id="0" * 32, **{"from": 7})
    frames = await asking.done()
    assert [frame["index"] for frame in frames] == [7, 8]
    assert frames[0]["event"] == "error"


async def test_frames_are_their_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another tenant, or nobody, gets nothing of a request, whatever number it names."""
    async with front(api_keys=KEYS, ping_bus_s=0.05) as edge:
        edge.mesh.script.stuck_after = 2
        mine, theirs, nobody = Asking(edge), Asking(edge), Asking(edge)
        await mine.ask(GENERATE, "_INBOX.one", api_key="key-a", **CHAT)
        await eventually(lambda: len(mine.frames) >= 2)
        asked = {"request_id": mine.frames[0]["request_id"], "from": 0}
        await theirs.ask(REPLAY, "_INBOX.two", api_key="key-b", **asked)
        await nobody.ask(REPLAY, "_INBOX.three", **asked)
        assert (await theirs.done())[0]["event"] == "error"
        assert (await nobody.done())[0]["data"]["error"]["code"] == "invalid_api_key"
        edge.mesh.script.stuck_after = None
        await mine.done()
        assert len(theirs.frames) == len(nobody.frames) == 2


@pytest.mark.usefixtures("quick")
async def test_a_client_with_a_key_repairs_with_it() -> None:
    async with front(api_keys=KEYS, ping_bus_s=0.05) as edge:
        bus = LossyBus(edge.broker, lambda n: n == 2)
        assert await text(Client(bus, model="tiny", api_key="key-a")) == "Hello, world!"
        assert bus.lost == 1


def frames_of(kept: Kept, name: str, count: int, size: int) -> Frames:
    frames = Frames(MemoryBus(), "_INBOX.x", name, packed=False)
    frames.keep(kept, "t")
    for _ in range(count):
        frames.put("chunk", msgspec.json.encode("x" * size))
    return frames


async def test_the_frames_of_one_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest go first; who asks for one that is gone is told which ones there are."""
    monkeypatch.setattr("services.gateway.frames.REQUEST_BYTES_MAX", 10_000)
    kept, broker = Kept(), MemoryBroker()
    heard: list[Any] = []
    await MemoryBus(broker).subscribe("_INBOX.y", lambda d: heard.append(json.loads(d.payload)))
    frames = Frames(MemoryBus(broker), "_INBOX.x", "r", packed=False)
    frames.keep(kept, "t")
    for _ in range(100):
        frames.put("chunk", msgspec.json.encode("x" * 1000))
    assert frames.bytes == kept.bytes <= 10_000
    frames.again("_INBOX.y", 0)
    frames.again("_INBOX.y", 95)
    await eventually(lambda: len(heard) == 7)
    assert [frame["event"] for frame in heard] == ["error", "done"] + ["chunk"] * 5
    assert [frame["index"] for frame in heard] == [0, 1, *range(95, 100)]


def test_the_frames_of_all_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of requests that have ended go first, in the order of their ends; then a live one keeps
    fewer.
    """
    monkeypatch.setattr("services.gateway.frames.KEPT_BYTES_MAX", 30_000)
    kept = Kept()
    for number in range(4):
        frames = frames_of(kept, f"old{number}", 5, 1000)
        kept.ended(frames)
    live = frames_of(kept, "live", 20, 1000)
    assert kept.bytes <= 30_000
    assert [kept.find(f"old{number}", "t") is None for number in range(4)][:2] == [True, True]
    assert kept.find("live", "t") is live
    frames_of(kept, "second", 40, 1000)
    assert kept.bytes <= 30_000
    assert all(kept.find(f"old{number}", "t") is None for number in range(4))


def test_frames_are_kept_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """After their time they are gone, and so are their bytes."""
    kept = Kept()
    kept.ended(frames_of(kept, "a", 3, 10))
    assert kept.find("a", "t") is not None
    assert kept.find("a", "u") is None
    monkeypatch.setattr("services.gateway.frames.KEPT_S", -1.0)
    assert kept.find("a", "t") is None
    assert kept.bytes == 0


async def test_a_follower_of_nothing_is_told(edge: Front) -> None:
    with pytest.raises(RequestFailed):
        async for _ in Client(MemoryBus(edge.broker)).follow("0" * 32):
            pass


class Forgetful:
    """A mesh that sends the first frame of two, and then says so often that it knows nothing."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.broker = MemoryBroker()
        self._bus = MemoryBus(self.broker)

    async def start(self) -> None:
        await self._bus.subscribe(GENERATE, lambda it: self._say(it, 0, "chunk", "one"))
        await self._bus.subscribe(REPLAY, self._again)

    def _again(self, delivery: Delivery) -> None:
        self.times -= 1
        if self.times < 0:
            self._say(delivery, 1, "chunk", "two")
        else:
            self._say(delivery, 1, "error", {"error": {"message": "None.", "code": "not_found"}})
        self._say(delivery, 2, "done", None)

    def _say(self, asked: Delivery, index: int, event: str, data: Any) -> None:
        frame = {"request_id": "r", "index": index, "event": event, "data": data}
        self._bus.publish(asked.reply, msgspec.msgpack.encode(frame))


@pytest.mark.usefixtures("quick")
async def test_one_gateway_that_does_not_know_a_request_is_not_the_end_of_it() -> None:
    """The one that runs it may be paused or cut off, and be back in time."""
    mesh = Forgetful(3)
    await mesh.start()
    stream = Client(MemoryBus(mesh.broker)).chat(messages=CHAT["messages"])
    assert [chunk async for chunk in stream] == ["one", "two"]


@pytest.mark.usefixtures("quick")
async def test_a_request_that_nobody_knows_for_long_is_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shared.client.GAP_MAX_S", 0.01)
    mesh = Forgetful(100)
    await mesh.start()
    stream = Client(MemoryBus(mesh.broker)).chat(messages=CHAT["messages"])
    assert await anext(stream) == "one"
    with pytest.raises(RequestFailed) as caught:
        await anext(stream)
    assert caught.value.openai_code == "not_found"
    assert mesh.times == 100 - ASKS_MAX
