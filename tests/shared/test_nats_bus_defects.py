"""Each defect of nats-py 2.16 that `shared.nats_bus` cures, against a server of the test's own.

Every test here fails when the cure it names is taken out.
"""

import asyncio
import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from deploy.servers import Running, start, start_nats
from shared.bus import Delivery
from shared.errors import DeadlineExceeded, InvalidRequest, Unavailable
from shared.nats_bus import MAX_PENDING, NatsBus
from shared.testing import eventually
from tests.shared.proxy import Proxy


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[Running]:
    """A server that the test may pause or kill."""
    running = start_nats(tmp_path)
    yield running
    running.stop()


@contextlib.asynccontextmanager
async def connected(
    nats: Running, url: str = "", *, public: bool = False, ping_interval: float = 5.0
) -> AsyncIterator[NatsBus]:
    """One client; where a silent server is to be found out, with pings fast enough for a test."""
    server = nats.server
    bus = await NatsBus.connect(
        url or server.url,
        server.public_user if public else server.user,
        server.public_password if public else server.password,
        name="test",
        ping_interval=ping_interval,
    )
    try:
        yield bus
    finally:
        await bus.close()


@contextlib.contextmanager
def paused(nats: Running) -> Iterator[None]:
    """The signal returns before every thread of the server stands still; wait for that."""
    os.kill(nats.process.pid, signal.SIGSTOP)
    try:
        threads = list(Path(f"/proc/{nats.process.pid}/task").iterdir())
        while any(_state(thread) != "T" for thread in threads):
            time.sleep(0.001)
        yield
    finally:
        os.kill(nats.process.pid, signal.SIGCONT)


def _state(thread: Path) -> str:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0]


@contextlib.contextmanager
def flooding(nats: Running, subject: str) -> Iterator[None]:
    """A publisher in a thread and loop of its own, so that it does not wait for the receiver."""
    stop = threading.Event()

    async def flood() -> None:
        async with connected(nats) as bus:
            while not stop.is_set():
                for _ in range(20):
                    bus.publish(subject, b"x" * 100)
                await bus.flush()

    thread = threading.Thread(target=asyncio.run, args=[flood()])
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def hears(bus: NatsBus, subject: str = "still.alive") -> bool:
    """Does a message still make the round trip?"""
    try:
        await bus.request(subject, b"", 5.0)
    except Unavailable:
        return True  # the server answered that nobody listens, and that answer arrived
    except DeadlineExceeded:
        return False
    return True


async def test_d1_flush_comes_after_what_was_published(nats: Running) -> None:
    """On the wire: PUB before PING, SUB before PING."""
    async with Proxy(nats.server.url) as proxy, connected(nats, proxy.url) as bus:
        del proxy.sent[:]
        bus.publish("a.b", b"x")
        await bus.flush()
        await bus.subscribe("c.d", lambda _delivery: None)
        lines = re.findall(rb"PUB a\.b|SUB c\.d|PING", bytes(proxy.sent))
    assert b"PUB a.b" in lines
    assert lines.index(b"PUB a.b") < lines.index(b"PING")
    assert b"PING" in lines[lines.index(b"SUB c.d") :]


@pytest.mark.parametrize("give_up", ["timeout", "cancel"])
async def test_d2_a_late_pong_does_no_harm(nats: Running, give_up: str) -> None:
    """A flush that gave up while the server was paused; its PONG comes after; messages flow on."""
    async with connected(nats) as bus:
        with paused(nats):
            flush = asyncio.create_task(bus.flush(0.05 if give_up == "timeout" else 5.0))
            await asyncio.wait({flush}, timeout=0.1)
            flush.cancel()
            with pytest.raises((DeadlineExceeded, asyncio.CancelledError)):
                await flush
        await bus.flush()
        assert await hears(bus)
        assert bus.reconnects == 0


async def test_d3_no_callback_stops_the_connection(nats: Running) -> None:
    """Errors reported from the read loop, and hooks that raise, leave it running."""

    def raises() -> None:
        raise ValueError("hook")

    server = nats.server
    async with connected(nats, public=True) as bus:
        bus.on_disconnected = bus.on_reconnected = raises
        bus.publish("mesh.v1.forbidden", b"")  # the server answers with an error
        await bus.flush()
        assert bus.connected
        nats.process.kill()
        nats.process.wait()
        await eventually(lambda: not bus.connected)
        again = start(server)
        try:
            await eventually(lambda: bus.connected)
        finally:
            again.stop()


async def test_d4_what_was_on_its_way_is_handled(nats: Running) -> None:
    """Unsubscribing under load, ten times: every message the server sent was handed over."""
    async with Proxy(nats.server.url) as proxy, connected(nats, proxy.url) as receiver:
        handled = 0

        def handler(_delivery: Delivery) -> None:
            nonlocal handled
            handled += 1

        proxy.dribble = True
        with flooding(nats, "load"):
            for _ in range(10):
                subscription = await receiver.subscribe("load", handler)
                enough = handled + 500
                await eventually(lambda enough=enough: handled > enough)
                await subscription.unsubscribe()
        await receiver.flush()
        assert proxy.received.count(b"MSG load ") == handled


async def test_d5_a_stalled_server_is_left(nats: Running) -> None:
    """Paused under write load: found out by its silence, and the bus is back when it wakes."""
    async with connected(nats, ping_interval=0.2) as bus:
        gone = asyncio.Event()
        bus.on_disconnected = gone.set
        with paused(nats):
            for _ in range(64):
                bus.publish("load", b"x" * 256 * 1024)
            await asyncio.wait_for(gone.wait(), 10)
            assert not bus.connected
        await eventually(lambda: bus.connected)
        assert bus.reconnects == 1
        assert await hears(bus)


async def test_d5_close_returns_although_the_server_is_stalled(nats: Running) -> None:
    async with connected(nats) as bus:
        with paused(nats):
            for _ in range(64):
                bus.publish("load", b"x" * 256 * 1024)
            await asyncio.wait_for(bus.close(), 10)


async def test_d6_a_cancelled_error_in_a_handler_ends_nothing(nats: Running) -> None:
    """The subscription goes on, and so does every other of the connection."""

    def handler(delivery: Delivery) -> None:
        got.append(delivery.payload)
        raise asyncio.CancelledError

    got: list[bytes] = []
    async with connected(nats) as bus:
        await bus.subscribe("a", handler)
        bus.publish("a", b"1")
        bus.publish("a", b"2")
        await eventually(lambda: got == [b"1", b"2"])
        assert await hears(bus)


async def test_d7_no_message_closes_the_connection(nats: Running) -> None:
    """The largest that passes the check also passes the server, with the longest subjects."""
    async with connected(nats) as bus:
        closed: list[str] = []
        bus.on_closed = closed.append
        largest = bytes(bus.max_payload)
        bus.publish("s" * 512, largest, "r" * 512)
        with pytest.raises(InvalidRequest):
            bus.publish("s", largest + b"x")
        with pytest.raises(InvalidRequest):
            bus.publish("s" * 513, b"", "r" * 512)
        await bus.flush()
        assert closed == []
        assert bus.reconnects == 0


async def test_d8_subscriptions_cost_no_task(nats: Running) -> None:
    """Handlers are called by the reader itself, so none waits behind another's task."""
    async with connected(nats) as bus:
        before = len(asyncio.all_tasks())
        got: list[str] = []
        for number in range(50):
            await bus.subscribe(f"n.{number}", lambda delivery: got.append(delivery.subject))
        for number in range(50):
            bus.publish(f"n.{number}", b"")
        await eventually(lambda: len(got) == 50)
        assert len(asyncio.all_tasks()) == before


async def test_a_killed_server_is_found_again(nats: Running) -> None:
    """Subscriptions are replayed, and what was published while it was away arrives in order."""
    async with connected(nats) as bus:
        events: list[str] = []
        bus.on_disconnected = lambda: events.append("lost")
        bus.on_reconnected = lambda: events.append("back")
        got: list[bytes] = []
        await bus.subscribe("a", lambda delivery: got.append(delivery.payload))
        nats.process.kill()
        nats.process.wait()
        await eventually(lambda: not bus.connected)
        flush = asyncio.create_task(bus.flush(30.0))
        sent = [b"%d" % number for number in range(100)]
        for payload in sent:
            bus.publish("a", payload)
        again = start(nats.server)
        try:
            await flush
            await eventually(lambda: got == sent)
            await bus.flush()
            assert events == ["lost", "back"]
            assert bus.reconnects == 1
        finally:
            again.stop()


async def test_a_reset_connection_comes_back_again_and_again(nats: Running) -> None:
    """Ten resets under load: reconnected each time, never out of order, nothing twice."""
    async with (
        Proxy(nats.server.url) as proxy,
        connected(nats, proxy.url) as receiver,
        connected(nats) as sender,
    ):
        got: list[int] = []
        await receiver.subscribe("a", lambda delivery: got.append(int(delivery.payload)))
        number = 0
        for reset in range(1, 11):
            proxy.cut()
            while receiver.reconnects < reset or not receiver.connected:
                sender.publish("a", b"%d" % number)
                number += 1
                await asyncio.sleep(0.001)
        sender.publish("a", b"%d" % number)
        await eventually(lambda: got[-1:] == [number])
        assert got == sorted(set(got))


async def test_flush_means_now_also_after_a_reconnect(nats: Running) -> None:
    """PONGs and the flushes that wait for them are not out of step after a reset: a flush returns
    only when its own messages are at the server.
    """
    async with Proxy(nats.server.url) as proxy, connected(nats, proxy.url) as bus:
        flushes = [asyncio.create_task(bus.flush(10)) for _ in range(5)]
        proxy.cut()
        await asyncio.gather(*flushes)
        await eventually(lambda: bus.connected)
        for number in range(20):
            bus.publish("a", b"%d" % number)
            await bus.flush()
            assert proxy.sent.count(b"PUB a ") == number + 1


async def test_while_away_the_buffer_is_bounded(nats: Running) -> None:
    """What is over the limit is dropped and counted; the rest arrives, oldest first."""
    async with connected(nats) as bus:
        nats.process.kill()
        nats.process.wait()
        await eventually(lambda: not bus.connected)
        size = 1024 * 1024
        for number in range(40):
            bus.publish("a", number.to_bytes(size, "big"))
        kept = MAX_PENDING // (size + 100)
        assert bus.counters["dropped_publishes"] == 40 - kept
        again = start(nats.server)
        try:
            await eventually(lambda: bus.connected)
            await bus.flush(10)
        finally:
            again.stop()


async def test_a_dead_reader_is_revived(nats: Running) -> None:
    """The watchdog replaces a connection whose tasks do not match its state."""
    async with connected(nats) as bus:
        task = bus._client._reading_task
        assert task is not None
        task.cancel()
        await eventually(lambda: bus.reconnects == 1)
        assert await hears(bus)


async def test_closed_for_good_is_told(nats: Running) -> None:
    """After a protocol violation nats-py never reconnects; the process is told, to end."""
    async with connected(nats) as bus:
        reasons: list[str] = []
        bus.on_closed = reasons.append
        bus._client.queue(b"PUB a 99999999\r\n")
        await eventually(lambda: bool(reasons))
        assert "maximum payload" in reasons[0].lower()
        assert not bus.connected


async def test_who_cannot_connect_is_told_why(nats: Running, tmp_path: Path) -> None:
    """Wrong password, and nobody there: `Unavailable` within the time given."""
    server = nats.server
    with pytest.raises(Unavailable, match=r"(?i)authorization"):
        await NatsBus.connect(server.url, server.user, "wrong", name="x", timeout_s=0.5)
    nats.stop()
    with pytest.raises(Unavailable, match=r"refused|Connect call failed"):
        await NatsBus.connect(server.url, server.user, "wrong", name="x", timeout_s=0.5)
