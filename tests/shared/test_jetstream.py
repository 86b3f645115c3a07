"""JetStream through our own bus, on a real server."""

import asyncio
import uuid
from pathlib import Path

import pytest

from deploy.servers import start, start_nats
from shared.bus import Delivery
from shared.errors import Unavailable
from shared.jetstream import (
    NANO,
    ConsumerConfig,
    JetStream,
    StreamConfig,
    StreamFull,
    WorkQueue,
    WrongLastSequence,
    heard,
)
from shared.nats_bus import NatsBus
from shared.testing import MemoryBus, eventually


@pytest.fixture
def name() -> str:
    """A stream of this test's own: the server is shared."""
    return f"s{uuid.uuid4().hex}"


def config(name: str, **limits: int) -> StreamConfig:
    return StreamConfig(
        name=name,
        subjects=[f"test.{name}.*"],
        retention="limits",
        max_age=60 * NANO,
        max_bytes=limits.get("max_bytes", 1 << 20),
        max_msgs_per_subject=limits.get("max_msgs_per_subject", 600),
        discard_new_per_subject=True,
        allow_direct=True,
        republish={"src": f"test.{name}.*", "dest": f"heard.{name}.{{{{wildcard(1)}}}}"},
    )


async def test_an_append_is_a_compare_and_swap_per_subject(bus: NatsBus, name: str) -> None:
    """It needs the subject's last sequence, whatever other subjects hold; a refused one leaves
    nothing, and a purged subject begins at 0 again.
    """
    stream = JetStream(bus)
    await stream.ensure_stream(config(name))
    a, b = f"test.{name}.a", f"test.{name}.b"
    first = await stream.append(a, b"a0", 0)
    assert await stream.append(b, b"b0", 0) == first + 1
    second = await stream.append(a, b"a1", first)
    for wrong in (0, first, second + 1):
        with pytest.raises(WrongLastSequence):
            await stream.append(a, b"lost", wrong)
    read = await stream.read(name, a)
    assert [(entry.seq, entry.payload) for entry in read] == [(first, b"a0"), (second, b"a1")]
    assert await stream.read(name, a, second) == []

    await stream.purge(name, a)
    assert await stream.read(name, a) == []
    with pytest.raises(WrongLastSequence):
        await stream.append(a, b"late", second)
    await stream.append(a, b"anew", 0)


async def test_a_long_log_is_read_whole_and_heard_whole(bus: NatsBus, name: str) -> None:
    """More entries than one direct get holds come in order; who listens hears each with the
    sequence before it.
    """
    stream, deliveries = JetStream(bus), list[Delivery]()
    await stream.ensure_stream(config(name))
    await bus.subscribe(f"heard.{name}.a", deliveries.append)
    last, sent = 0, []
    for number in range(520):
        last = await stream.append(f"test.{name}.a", b"%d" % number, last)
        sent.append((last, b"%d" % number))
    read = await stream.read(name, f"test.{name}.a")
    assert [(entry.seq, entry.payload) for entry in read] == sent
    await eventually(lambda: len(deliveries) == len(sent))
    entries = [heard(delivery) for delivery in deliveries]
    assert [(entry.seq, entry.payload) for entry in entries] == sent
    assert [entry.before for entry in entries] == [0, *(seq for seq, _ in sent[:-1])]


async def test_the_limits_of_a_stream_are_typed(bus: NatsBus, name: str) -> None:
    """Too many messages on one subject, too many bytes in all: `StreamFull`, nothing is dropped."""
    stream = JetStream(bus)
    await stream.ensure_stream(config(name, max_bytes=1 << 16, max_msgs_per_subject=2))
    last = await stream.append(f"test.{name}.a", b"1", 0)
    last = await stream.append(f"test.{name}.a", b"2", last)
    with pytest.raises(StreamFull):
        await stream.append(f"test.{name}.a", b"3", last)
    with pytest.raises(StreamFull):
        await stream.append(f"test.{name}.b", b"x" * (1 << 16), 0)
    assert len(await stream.read(name, f"test.{name}.a")) == 2
    assert (await stream.usage(name)).messages == 2


async def test_a_stream_takes_new_limits(bus: NatsBus, name: str) -> None:
    """Asked for again it stays as it is; asked for with other limits it has those."""
    stream = JetStream(bus)
    await stream.ensure_stream(config(name, max_msgs_per_subject=1))
    last = await stream.append(f"test.{name}.a", b"1", 0)
    await stream.ensure_stream(config(name, max_msgs_per_subject=1))
    await stream.ensure_stream(config(name, max_msgs_per_subject=2))
    await stream.append(f"test.{name}.a", b"2", last)


async def test_a_job_comes_again_until_it_is_done(bus: NatsBus, name: str) -> None:
    """A job that nobody settles comes again after the wait, one given back at once, one worked on
    or done not; a second job of a name that waits is refused.
    """
    stream = JetStream(bus)
    await stream.ensure_stream(
        StreamConfig(
            name=name,
            subjects=[f"test.{name}.*"],
            retention="workqueue",
            max_age=60 * NANO,
            max_bytes=1 << 20,
        )
    )
    consumer = ConsumerConfig(
        durable_name="c", ack_wait=NANO // 2, max_deliver=10, max_ack_pending=10
    )
    await stream.ensure_consumer(name, consumer)
    await stream.ensure_consumer(name, consumer)
    queue, other = WorkQueue(bus, name, "c"), WorkQueue(bus, name, "c")
    assert await queue.next(0.1) is None
    await stream.append(f"test.{name}.a", b"", 0)
    with pytest.raises(WrongLastSequence):
        await stream.append(f"test.{name}.a", b"", 0)

    first = await queue.next(1.0)
    assert first is not None
    assert first.name == "a"
    again = await other.next(5.0)
    assert again is not None, "nobody said that it was being worked on"
    for _ in range(10):
        again.working()
        assert await queue.next(0.1) is None
    again.again()
    last = await queue.next(0.4)
    assert last is not None
    assert last.name == "a"
    last.done()
    assert await queue.next(1.0) is None
    await stream.append(f"test.{name}.a", b"", 0)
    assert await queue.next(1.0) is not None, "done jobs do not stand in the way"


async def abandon_a_pull(bus: NatsBus, queue: WorkQueue, name: str) -> None:
    """Whoever asked for the next job has gone; the question stands."""
    pulls: list[Delivery] = []
    await bus.subscribe(f"$JS.API.CONSUMER.MSG.NEXT.{name}.c", pulls.append)
    asking = asyncio.create_task(queue.next(10.0))
    await eventually(lambda: len(pulls) == 1, what="the pull")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_job_that_comes_late_is_not_lost(bus: NatsBus, name: str) -> None:
    """A pull may be answered after the one who waited has gone: the next one has it."""
    stream = JetStream(bus)
    subjects = [f"test.{name}.*"]
    await stream.ensure_stream(
        StreamConfig(
            name=name, subjects=subjects, retention="workqueue", max_age=0, max_bytes=1 << 20
        )
    )
    await stream.ensure_consumer(
        name, ConsumerConfig(durable_name="c", ack_wait=NANO, max_deliver=10, max_ack_pending=10)
    )
    queue = WorkQueue(bus, name, "c")
    await abandon_a_pull(bus, queue, name)
    await stream.append(f"test.{name}.a", b"", 0)
    job = await queue.next(0.5)
    assert job is not None
    job.done()


async def test_no_jetstream_is_unavailable() -> None:
    """Nobody who answers, or who answers something else, is `Unavailable` and nothing worse."""
    bus = MemoryBus()
    stream = JetStream(bus, timeout_s=0.05)
    with pytest.raises(Unavailable):
        await stream.append("test.a", b"", 0)
    with pytest.raises(Unavailable):
        await stream.read("s", "test.a")
    await bus.subscribe("test.a", lambda asked: bus.publish(asked.reply, b"what?"))
    with pytest.raises(Unavailable):
        await stream.append("test.a", b"", 0)
    assert await WorkQueue(bus, "s", "c").next(0.01) is None


async def test_what_a_server_has_stored_outlives_it(tmp_path: Path) -> None:
    """SIGKILL of the server: each acknowledged append is there when it is back, and the same
    objects go on through the same connection.
    """
    running = start_nats(tmp_path)
    server = running.server
    bus = await NatsBus.connect(server.url, server.user, server.password, name="test")
    stream = JetStream(bus)
    await stream.ensure_stream(config("s"))
    last = 0
    for number in range(50):
        last = await stream.append("test.s.a", b"%d" % number, last)
    running.process.kill()
    running.process.wait()
    with pytest.raises(Unavailable):
        await stream.append("test.s.a", b"nobody", last)
    again = start(server)
    await eventually(lambda: bus.connected, what="the reconnect")
    assert [e.payload for e in await stream.read("s", "test.s.a")] == [b"%d" % n for n in range(50)]
    await bus.close()
    again.stop()


async def test_a_queue_that_closes_gives_back_what_it_holds(bus: NatsBus, name: str) -> None:
    """A job that came for a pull nobody waits for any more is somebody else's at once."""
    stream = JetStream(bus)
    subjects = [f"test.{name}.*"]
    await stream.ensure_stream(
        StreamConfig(
            name=name, subjects=subjects, retention="workqueue", max_age=0, max_bytes=1 << 20
        )
    )
    consumer = ConsumerConfig(
        durable_name="c", ack_wait=60 * NANO, max_deliver=10, max_ack_pending=10
    )
    await stream.ensure_consumer(name, consumer)
    closing, other = WorkQueue(bus, name, "c"), WorkQueue(bus, name, "c")
    await abandon_a_pull(bus, closing, name)
    await stream.append(f"test.{name}.a", b"", 0)
    await closing.close()
    job = await other.next(5.0)
    assert job is not None
    assert job.name == "a"
