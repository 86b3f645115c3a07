"""Kit for tests: a bus in memory that can misbehave on demand, a clock, an actor's life."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from shared.actor import Actor
from shared.bus import Delivery, Handler, Headers
from shared.errors import DeadlineExceeded, Unavailable
from shared.publish import publish_command, write_headers

MAX_PAYLOAD = 8 * 1024 * 1024
MAX_PENDING = 32 * 1024 * 1024


class FakeClock:
    """A `Clock` that moves only when told."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> float:
        """Move on; the new time."""
        assert seconds >= 0
        self.now += seconds
        return self.now


async def eventually(predicate: Callable[[], bool], timeout_s: float = 5.0, what: str = "") -> None:
    """Return as soon as `predicate` holds; fail after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not predicate():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what or predicate}")
        await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(actor: Actor, timeout_s: float = 10.0) -> AsyncIterator[Actor]:
    """`actor` from ready to stopped; what it raised is raised here."""
    task = asyncio.create_task(actor.run())
    try:
        await eventually(lambda: actor.ready or task.done(), timeout_s, f"{actor.role} ready")
        if task.done():
            task.result()
        yield actor
    finally:
        actor.stop()
        await asyncio.wait_for(task, timeout_s)


def matches(pattern: str, subject: str) -> bool:
    """NATS wildcards: `*` is one token, a last `>` is one or more."""
    wanted, given = pattern.split("."), subject.split(".")
    for index, part in enumerate(wanted):
        if part == ">":
            return len(given) > index
        if index >= len(given) or part not in {"*", given[index]}:
            return False
    return len(wanted) == len(given)


@dataclass
class Faults:
    """What a `MemoryBus` does to each delivery; probabilities, drawn from a seeded generator."""

    lose: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0  # held back behind what is delivered next
    delay: float = 0.0
    delay_s: float = 0.02  # most that a delayed delivery waits


@dataclass(eq=False)
class MemorySubscription:
    """One interest of one `MemoryBus`."""

    bus: "MemoryBus"
    pattern: str
    queue: str
    handler: Handler
    held: list[Delivery] = field(default_factory=list)  # reordered: go after the next delivery

    async def unsubscribe(self) -> None:
        self.bus.broker.subscriptions.pop(self, None)


class MemoryBroker:
    """The server side of `MemoryBus`: several buses on one broker are several clients.

    `faults` may be changed at any time; every draw comes from `seed`: a schedule can be replayed.
    A fault applies to one delivery of a message to one subscriber. Requests for which nobody
    listens are answered at once even when `lose` is 1: the sender's own server says so.
    """

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.faults = faults or Faults()
        self.lost = self.duplicated = self.reordered = self.delayed = 0
        self.subscriptions: dict[MemorySubscription, None] = {}  # a set that keeps its order
        self._rng = random.Random(seed)  # noqa: S311 replayable, not secret

    def route(self, delivery: Delivery) -> bool:
        """Deliver to every plain subscriber and to one of each queue group; was there any?"""
        groups: dict[tuple[str, str], list[MemorySubscription]] = {}
        for index, subscription in enumerate(self.subscriptions):
            if subscription.bus.connected and matches(subscription.pattern, delivery.subject):
                member = (subscription.pattern, subscription.queue)
                group = member if subscription.queue else ("", str(index))
                groups.setdefault(group, []).append(subscription)
        for members in groups.values():
            self._deliver(self._rng.choice(members) if len(members) > 1 else members[0], delivery)
        return bool(groups)

    def _deliver(self, to: MemorySubscription, delivery: Delivery) -> None:
        faults, draw = self.faults, self._rng.random
        if draw() < faults.lose:
            self.lost += 1
            return
        loop = asyncio.get_running_loop()
        copies = 1
        if draw() < faults.duplicate:
            self.duplicated += 1
            copies = 2
        for _ in range(copies):
            if draw() < faults.reorder:
                self.reordered += 1
                to.held.append(delivery)
                loop.call_later(faults.delay_s, self._release, to)
            elif draw() < faults.delay:
                self.delayed += 1
                loop.call_later(draw() * faults.delay_s, self._hand_over, to, delivery)
            else:
                loop.call_soon(self._hand_over, to, delivery)

    def _hand_over(self, to: MemorySubscription, delivery: Delivery) -> None:
        if to.bus.connected:
            to.handler(delivery)
        self._release(to)

    def _release(self, to: MemorySubscription) -> None:
        held, to.held = to.held, []
        for delivery in held:
            if to.bus.connected:
                to.handler(delivery)


class MemoryBus:
    """A `Bus` without a server. `MemoryBus()` is a mesh of its own; pass a broker to share one."""

    def __init__(
        self,
        broker: MemoryBroker | None = None,
        *,
        max_payload: int = MAX_PAYLOAD,
        max_pending: int = MAX_PENDING,
    ) -> None:
        self.broker = broker or MemoryBroker()
        self.counters: Counter[str] = Counter()
        self._max_payload = max_payload
        self._max_pending = max_pending
        self._pending: list[Delivery] = []
        self._connected = True
        self._requests = 0

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def reconnects(self) -> int:
        return self.counters["reconnects"]

    def disconnect(self) -> None:
        """The connection is gone: nothing arrives, and what is published waits for `reconnect`."""
        self._connected = False

    def reconnect(self) -> None:
        """The connection is back; what was published meanwhile goes out."""
        self._connected = True
        self.counters["reconnects"] += 1
        pending, self._pending = self._pending, []
        for delivery in pending:
            self.broker.route(delivery)

    def publish(
        self, subject: str, payload: bytes, reply: str = "", headers: Headers = None
    ) -> None:
        self._send(Delivery(subject, payload, reply, write_headers(headers)))

    async def subscribe(
        self, subject: str, handler: Handler, queue: str = ""
    ) -> MemorySubscription:
        subscription = MemorySubscription(self, subject, queue, handler)
        self.broker.subscriptions[subscription] = None
        return subscription

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: Headers = None
    ) -> Delivery:
        self._requests += 1
        inbox = f"_MEMORY.{id(self)}.{self._requests}"
        answer: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()

        def take(delivery: Delivery) -> None:
            if not answer.done():
                answer.set_result(delivery)

        subscription = await self.subscribe(inbox, take)
        try:
            if not self._send(Delivery(subject, payload, inbox, write_headers(headers))):
                raise Unavailable(f"nobody listens on {subject}")
            async with asyncio.timeout(timeout_s):
                return await answer
        except TimeoutError:
            raise DeadlineExceeded(f"no answer on {subject} within {timeout_s} s") from None
        finally:
            await subscription.unsubscribe()

    async def flush(self, timeout_s: float = 2.0) -> None:
        if not self._connected:
            raise DeadlineExceeded(f"not connected within {timeout_s} s")
        await asyncio.sleep(0)

    async def close(self) -> None:
        await asyncio.sleep(0)  # what was routed to it before is handled first
        for subscription in list(self.broker.subscriptions):
            if subscription.bus is self:
                await subscription.unsubscribe()
        self._connected = False

    def _send(self, delivery: Delivery) -> bool:
        """False when it is known that nobody listens."""
        publish_command(delivery, self._max_payload)
        if self._connected:
            return self.broker.route(delivery)
        waiting = sum(len(waits.payload) for waits in self._pending)
        if waiting + len(delivery.payload) > self._max_pending:
            self.counters["dropped_publishes"] += 1
        else:
            self._pending.append(delivery)
        return True
