"""The misbehaviour of `MemoryBus` is real, counted, and the same for the same seed."""

from collections.abc import Callable

import pytest

from shared.bus import Delivery
from shared.errors import DeadlineExceeded, Unavailable
from shared.testing import FakeClock, Faults, MemoryBroker, MemoryBus, eventually, matches

SENT = [b"%d" % number for number in range(1000)]


async def received(broker: MemoryBroker, done: Callable[[list[bytes]], bool]) -> list[bytes]:
    bus = MemoryBus(broker)
    got: list[bytes] = []
    await bus.subscribe("a", lambda delivery: got.append(delivery.payload))
    for payload in SENT:
        bus.publish("a", payload)
    await eventually(lambda: done(got))
    return got


async def test_lose() -> None:
    """About a third is lost, the rest keeps its order; the same seed loses the same."""
    runs = []
    for _ in range(2):
        broker = MemoryBroker(seed=7, faults=Faults(lose=0.3))
        runs.append(await received(broker, lambda got, b=broker: len(got) + b.lost == len(SENT)))
        assert 200 < broker.lost < 400
    assert runs[0] == runs[1]
    assert runs[0] == sorted(runs[0], key=int)
    other = MemoryBroker(seed=8, faults=Faults(lose=0.3))
    assert await received(other, lambda got: len(got) + other.lost == len(SENT)) != runs[0]


async def test_duplicate() -> None:
    broker = MemoryBroker(faults=Faults(duplicate=0.2))
    got = await received(broker, lambda got: len(got) == len(SENT) + broker.duplicated)
    assert broker.duplicated > 100
    assert sorted(set(got)) == sorted(SENT)


@pytest.mark.parametrize("faults", [Faults(reorder=0.2), Faults(delay=0.2)])
async def test_reorder_and_delay(faults: Faults) -> None:
    """Nothing is lost or doubled, but the order is another."""
    broker = MemoryBroker(faults=faults)
    got = await received(broker, lambda got: len(got) == len(SENT))
    assert sorted(got) == sorted(SENT)
    assert got != SENT
    assert broker.reordered + broker.delayed > 100


async def test_the_last_message_is_not_held_back_for_ever() -> None:
    """A reordered delivery comes even when nothing follows it."""
    bus = MemoryBus(MemoryBroker(faults=Faults(reorder=1.0)))
    got: list[Delivery] = []
    await bus.subscribe("a", got.append)
    bus.publish("a", b"last")
    await eventually(lambda: len(got) == 1)


async def test_a_disconnected_bus() -> None:
    """Hears nothing, keeps what it publishes up to the limit, and counts the reconnect."""
    broker = MemoryBroker()
    one, other = MemoryBus(broker, max_pending=10), MemoryBus(broker)
    heard_by_one: list[Delivery] = []
    heard_by_other: list[bytes] = []
    await one.subscribe("a", heard_by_one.append)
    await other.subscribe("b", lambda delivery: heard_by_other.append(delivery.payload))
    one.disconnect()
    assert not one.connected
    other.publish("a", b"lost")
    for payload in (b"12345", b"67890", b"!"):
        one.publish("b", payload)
    with pytest.raises(DeadlineExceeded):
        await one.flush(0.01)
    with pytest.raises(Unavailable):
        await other.request("a", b"", 0.01)
    one.reconnect()
    await eventually(lambda: len(heard_by_other) == 2)
    assert heard_by_other == [b"12345", b"67890"]
    assert (heard_by_one, one.counters["dropped_publishes"], one.reconnects) == ([], 1, 1)


async def test_unsubscribed_and_closed_leave_nothing() -> None:
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    await bus.subscribe("a", lambda _delivery: None)
    subscription = await bus.subscribe("b", lambda _delivery: None)
    await subscription.unsubscribe()
    await bus.close()
    assert not broker.subscriptions


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a", "a", True),
        ("a", "a.b", False),
        ("a.*", "a", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("*", "a", True),
        (">", "a.b", True),
        ("a.>", "a", False),
        ("a.>", "a.b.c", True),
        ("a.*.c", "a.b.c", True),
        ("a.*.c", "a.b.d", False),
    ],
)
def test_wildcards(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


async def test_eventually_gives_up() -> None:
    with pytest.raises(AssertionError, match="the moon"):
        await eventually(lambda: False, 0.01, "the moon")


def test_a_clock_that_moves_when_told() -> None:
    clock = FakeClock(5.0)
    assert (clock(), clock.advance(1.5), clock()) == (5.0, 6.5, 6.5)
    with pytest.raises(AssertionError):
        clock.advance(-1)
