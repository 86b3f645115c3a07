"""One contract, two buses: what is true of NATS must be true of the fake that stands for it."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from deploy.servers import Server
from shared.bus import Bus, Delivery
from shared.errors import DeadlineExceeded, InvalidRequest, Unavailable
from shared.nats_bus import NatsBus
from shared.publish import read_headers
from shared.testing import MemoryBroker, MemoryBus, eventually

Connect = Callable[[], Awaitable[Bus]]


@pytest.fixture(params=["nats", "memory"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Connects one more client to the same broker."""
    buses: list[Bus] = []
    broker = MemoryBroker()

    async def connected() -> Bus:
        bus: Bus
        if request.param == "memory":
            bus = MemoryBus(broker)
        else:
            server: Server = request.getfixturevalue("nats_server")
            bus = await NatsBus.connect(server.url, server.user, server.password, name="test")
        buses.append(bus)
        return bus

    yield connected
    for bus in buses:
        await bus.close()


@pytest.fixture
def root() -> str:
    """A subject prefix of this test's own: the real server is shared."""
    return f"test.{uuid.uuid4().hex}"


async def test_a_payload_arrives_as_it_was_sent(connect: Connect, root: str) -> None:
    """Any bytes, the subject, and the reply subject come through; an empty payload too."""
    sender, receiver = await connect(), await connect()
    got: list[Delivery] = []
    await receiver.subscribe(f"{root}.a", got.append)
    sender.publish(f"{root}.a", bytes(range(256)), f"{root}.reply")
    sender.publish(f"{root}.a", b"")
    await eventually(lambda: len(got) == 2)
    assert got[0] == Delivery(f"{root}.a", bytes(range(256)), f"{root}.reply")
    assert got[1] == Delivery(f"{root}.a", b"", "")


async def test_headers_arrive_with_their_payload(connect: Connect, root: str) -> None:
    """Headers go with a message and with a question, and what is no header is refused."""
    bus = await connect()
    got: list[Delivery] = []

    def answer(delivery: Delivery) -> None:
        got.append(delivery)
        if delivery.reply:
            bus.publish(delivery.reply, b"yes", headers={"In": "c"})

    await bus.subscribe(root, answer)
    bus.publish(root, b"told", headers={"One": "1", "Two": "a b"})
    answered = await bus.request(root, b"asked", 2.0, headers={"One": "2"})
    assert read_headers(got[0].headers) == (0, {"One": "1", "Two": "a b"})
    assert read_headers(got[1].headers) == (0, {"One": "2"})
    assert read_headers(answered.headers) == (0, {"In": "c"})
    assert [delivery.payload for delivery in got] == [b"told", b"asked"]
    for bad in ({"One": "1\r\nTwo: 2"}, {"One:": "1"}, {"": "1"}, {"One": "\u00e9"}):
        with pytest.raises(InvalidRequest):
            bus.publish(root, b"", headers=bad)
    with pytest.raises(InvalidRequest):
        bus.publish(root, b"x" * 8 * 1024 * 1024, headers={"One": "1"})


async def test_a_sender_is_heard_by_itself(connect: Connect, root: str) -> None:
    bus = await connect()
    got: list[Delivery] = []
    await bus.subscribe(root, got.append)
    bus.publish(root, b"me")
    await eventually(lambda: len(got) == 1)


async def test_order_is_kept_per_publisher(connect: Connect, root: str) -> None:
    """5,000 messages on two subjects through one wildcard subscription: first in, first out."""
    sender, receiver = await connect(), await connect()
    got: list[bytes] = []
    await receiver.subscribe(f"{root}.*", lambda delivery: got.append(delivery.payload))
    sent = [b"%d" % number for number in range(5000)]
    for number, payload in enumerate(sent):
        sender.publish(f"{root}.{number % 2}", payload)
    await eventually(lambda: len(got) == len(sent))
    assert got == sent


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("a.b", ["a.b"]),
        ("a.*", ["a.b", "a.c"]),
        ("*.b", ["a.b"]),
        ("a.>", ["a.b", "a.c", "a.b.d"]),
        (">", ["a.b", "a.c", "a.b.d", "a"]),
    ],
)
async def test_wildcards(connect: Connect, root: str, pattern: str, heard: list[str]) -> None:
    bus = await connect()
    got: list[str] = []
    await bus.subscribe(f"{root}.{pattern}", lambda delivery: got.append(delivery.subject))
    for subject in ("a.b", "a.c", "a.b.d", "a"):
        bus.publish(f"{root}.{subject}", b"")
    done = asyncio.Event()
    await bus.subscribe(f"{root}-end", lambda _delivery: done.set())
    bus.publish(f"{root}-end", b"")
    await asyncio.wait_for(done.wait(), 5)
    assert got == [f"{root}.{subject}" for subject in heard]


async def test_a_queue_group_hears_each_message_once(connect: Connect, root: str) -> None:
    """Every message goes to one member of the group, and to each plain subscriber."""
    buses = [await connect() for _ in range(3)]
    members: list[list[bytes]] = [[], []]
    plain: list[bytes] = []
    for bus, seen in zip(buses, members, strict=False):
        await bus.subscribe(
            root, lambda delivery, seen=seen: seen.append(delivery.payload), queue="group"
        )
    await buses[2].subscribe(root, lambda delivery: plain.append(delivery.payload))
    sent = [b"%d" % number for number in range(200)]
    for payload in sent:
        buses[2].publish(root, payload)
    await eventually(lambda: len(plain) == 200 and sum(map(len, members)) == 200)
    assert sorted(members[0] + members[1]) == sorted(sent)
    assert all(members), "one member had everything"


async def test_on_return_of_subscribe_nothing_is_missed(connect: Connect, root: str) -> None:
    """What anyone publishes after `subscribe` returned arrives; repeated, to catch a race."""
    sender, receiver = await connect(), await connect()
    for number in range(100):
        got: list[Delivery] = []
        subscription = await receiver.subscribe(f"{root}.{number}", got.append)
        sender.publish(f"{root}.{number}", b"")
        await eventually(lambda got=got: len(got) == 1)
        await subscription.unsubscribe()


async def test_after_unsubscribe_nothing_arrives(connect: Connect, root: str) -> None:
    bus = await connect()
    got: list[Delivery] = []
    subscription = await bus.subscribe(root, got.append)
    await subscription.unsubscribe()
    await subscription.unsubscribe()
    bus.publish(root, b"late")
    with pytest.raises(Unavailable):
        await bus.request(root, b"", 1.0)
    assert got == []


async def test_a_request_is_answered(connect: Connect, root: str) -> None:
    """50 at once: each gets its own answer."""
    client, server = await connect(), await connect()
    await server.subscribe(root, lambda asked: server.publish(asked.reply, asked.payload[::-1]))
    asked = [b"%03d" % number for number in range(50)]
    answers = await asyncio.gather(*(client.request(root, question, 5.0) for question in asked))
    assert [answer.payload for answer in answers] == [question[::-1] for question in asked]


async def test_a_request_to_nobody_is_unavailable(connect: Connect, root: str) -> None:
    """At once, not after the timeout."""
    bus = await connect()
    with pytest.raises(Unavailable):
        await asyncio.wait_for(bus.request(root, b"", 60.0), 5.0)


async def test_a_request_nobody_answers_is_past_its_deadline(connect: Connect, root: str) -> None:
    bus = await connect()
    await bus.subscribe(root, lambda _asked: None)
    with pytest.raises(DeadlineExceeded):
        await bus.request(root, b"", 0.05)


async def test_a_late_answer_meets_nobody(connect: Connect, root: str) -> None:
    """An answer after the timeout is dropped and hurts no later request."""
    bus = await connect()
    asked: list[Delivery] = []
    await bus.subscribe(root, asked.append)
    with pytest.raises(DeadlineExceeded):
        await bus.request(root, b"first", 0.05)
    second = asyncio.create_task(bus.request(root, b"second", 5.0))
    await eventually(lambda: len(asked) == 2)
    bus.publish(asked[0].reply, b"late")
    bus.publish(asked[1].reply, b"right")
    assert (await second).payload == b"right"


async def test_too_large_is_refused_and_nothing_breaks(connect: Connect, root: str) -> None:
    """The largest payload passes, one byte more is `InvalidRequest`, and the bus lives on."""
    bus = await connect()
    got: list[int] = []
    await bus.subscribe(root, lambda delivery: got.append(len(delivery.payload)))
    largest = 8 * 1024 * 1024
    bus.publish(root, bytes(largest))
    with pytest.raises(InvalidRequest):
        bus.publish(root, bytes(largest + 1))
    bus.publish(root, b"x")
    await eventually(lambda: got == [largest, 1])
    assert bus.reconnects == 0


@pytest.mark.parametrize(
    "subject", ["", "a b", "a..b", ".a", "a.", "a.*", "a.>", "a\r\nPUB b 0\r\n", "ü", "a" * 2000]
)
async def test_a_bad_subject_is_refused(connect: Connect, subject: str) -> None:
    """As subject and as reply subject: the server would close the connection, or worse, obey."""
    bus = await connect()
    with pytest.raises(InvalidRequest):
        bus.publish(subject, b"")
    if subject:
        with pytest.raises(InvalidRequest):
            bus.publish("a", b"", subject)
    await bus.flush()
    assert bus.connected


@pytest.mark.parametrize("error", [ValueError, asyncio.CancelledError])
async def test_a_raising_handler_hurts_only_itself(
    connect: Connect, root: str, error: type[BaseException]
) -> None:
    """Later messages of the same subscription are still delivered (D6: even a CancelledError)."""
    bus = await connect()
    got: list[bytes] = []

    def handler(delivery: Delivery) -> None:
        got.append(delivery.payload)
        raise error("handler")

    await bus.subscribe(root, handler)
    bus.publish(root, b"1")
    bus.publish(root, b"2")
    await eventually(lambda: got == [b"1", b"2"])


async def test_close_hands_over_what_was_received(connect: Connect, root: str) -> None:
    """All that was published before `close` began is handled before it returns."""
    sender, receiver = await connect(), await connect()
    got: list[bytes] = []
    await receiver.subscribe(root, lambda delivery: got.append(delivery.payload))
    for number in range(1000):
        sender.publish(root, b"%d" % number)
    await sender.flush()
    await receiver.close()
    assert len(got) == 1000
    assert not receiver.connected


async def test_close_sends_what_was_published(connect: Connect, root: str) -> None:
    sender, receiver = await connect(), await connect()
    got: list[bytes] = []
    await receiver.subscribe(root, lambda delivery: got.append(delivery.payload))
    for number in range(1000):
        sender.publish(root, b"%d" % number)
    await sender.close()
    await eventually(lambda: len(got) == 1000)
