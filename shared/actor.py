"""The thin shell around a pure core: mailbox, timer, heartbeats, drain and failure.

One actor per process, one event loop, no locks: everything below runs on the loop, and nothing
here waits while it holds a half-changed core.
"""

import asyncio
import contextlib
import datetime
import os
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar

import msgspec

from shared import metrics, subjects
from shared.bus import Bus, Delivery
from shared.clock import Clock, monotonic
from shared.config import Launch, Status
from shared.core import Core
from shared.errors import Code, InvalidRequest
from shared.legs import deadline_s, named_by
from shared.liveness import LATE_S
from shared.log import Throttle, log
from shared.mailbox import Mailbox, Queued
from shared.messages import Beat, Failed, Message, encode
from shared.micro import Micro

BATCH = 256  # messages handled before the loop gets its turn again,
TURN_S = 0.02  # or as many as this takes: beats do not wait for a mailbox of slow ones
STATUS_S = 0.25
SETTLED_S = 0.1  # beats cross the mesh in a few milliseconds, busy ones in tens
STOP_S = 5.0  # for `on_stop`; after that the process ends anyway


class Actor:
    """One service process. Subclasses name `role` and `mailbox` and add what their core needs.

    Order of a life: beats and status lines start (not ready) -> `on_start` -> subscribe -> ready ->
    `on_ready` ... `stop()` -> draining -> `drain`, for `drain_s` or until `hurry()` -> `last_words`
    -> `on_stop`. `on_start` must not block the loop (a process silent for 10 s is killed); put long
    work in a thread.

    An exception out of the core: every leg that the message names is told `Failed(internal)`.
    Then the process goes on if `survives_errors` (its core keeps no state between messages), else
    it ends with the error, because its state may be wrong, and the supervisor starts it afresh.
    """

    role: ClassVar[str]
    mailbox: ClassVar[Any]
    """Union of the messages it takes; decoded by one typed decoder."""
    beat_s: ClassVar[float] = 0.25
    tick_s: ClassVar[float] = 0.05
    drain_s: float = 10.0
    mailbox_limit: ClassVar[int] = 8192  # messages per lane; two seconds of a busy detokenizer
    survives_errors: ClassVar[bool] = False

    def __init__(
        self, launch: Launch, bus: Bus, core: Core[Any] | None, clock: Clock = monotonic
    ) -> None:
        self.launch = launch
        self.instance = launch.instance
        self.bus = bus
        self.core = core
        self.clock = clock
        self.ready = False
        self.draining = False
        self.detail = ""  # the stage while starting, shown by `shoal status`
        self.handled = 0
        self.errors = 0  # messages dropped, for whatever reason
        self._counters: Counter[str] = Counter()  # dropped_<why>, slept
        self._queue = Mailbox(self.mailbox_limit)
        self._decoder = msgspec.msgpack.Decoder(self.mailbox)
        self._work_scheduled = False
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._arrived = 0  # payloads
        self._fatal: Exception | None = None
        self._beats = 0
        self._next_beat = self._next_status = float("-inf")
        self._due = self.clock() + self.tick_s
        self._up = True
        self._reconnects = bus.reconnects
        self._throttle = Throttle()
        self._started = datetime.datetime.now(datetime.UTC).isoformat()
        self._micro = Micro(launch, self._listens(), {"pool": launch.pool, "proto": "1"})

    # --- for subclasses ------------------------------------------------------------------------

    def subjects(self) -> list[str]:
        """Extra subjects to listen on; the own inbox and everyone of the role are always on."""
        return []

    def on_payload(self, payload: bytes) -> None:
        """One payload from the bus: decode it and queue it."""
        now = self.clock()
        try:
            message = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            self.drop("decode")
            self._throttle.warning("undecodable", now, size=len(payload), error=str(error))
            return
        if self._queue.put(message, now) is not None:
            self.drop("full")
            self._throttle.warning("mailbox_full", now, limit=self.mailbox_limit)
        if not self._work_scheduled:
            self._work_scheduled = True
            asyncio.get_running_loop().call_soon(self._work)

    def receive(self, message: Any, now: float) -> None:
        """Handle one decoded message; the core's `receive` unless overridden."""
        if self.core is not None:
            self.core.receive(message, now)

    def tick(self, now: float) -> None:
        """What time brings, every `tick_s`; the core's `tick` unless overridden."""
        if self.core is not None:
            self.core.tick(now)

    def beat(self) -> Beat:
        """The next heartbeat; override with `msgspec.structs.replace(super().beat(), ...)`."""
        self._beats += 1
        return Beat(
            instance=self.instance,
            role=self.role,
            seq=self._beats,
            ready=self.ready,
            draining=self.draining,
        )

    def status(self) -> Status:
        """What the supervisor is told."""
        state = "draining" if self.draining else "ready" if self.ready else "starting"
        return Status(state=state, detail=self.detail)

    def stats(self) -> dict[str, int]:
        """What `$SRV.STATS` and `/metrics` show; a subclass adds what bus and core do not hold."""
        bus = {f"bus_{name}": count for name, count in self.bus.counters.items()}
        core = {} if self.core is None else self.core.counters
        return {"handled": self.handled, "errors": self.errors, **self._counters, **bus, **core}

    async def on_start(self) -> None:
        """Load and connect, before the first message is taken."""

    async def on_ready(self) -> None:
        """Subscribed and ready."""

    async def drain(self) -> None:
        """Take nothing new; return when nothing is left to wait for. Cancelled when time is up."""

    async def last_words(self) -> None:
        """Tell whoever still waits for us that it will be somebody else, or nobody."""

    async def on_stop(self) -> None:
        """Close what `on_start` opened; also after a failure."""

    def on_disconnected(self, now: float) -> None:
        """The bus is gone: by default the core is told, if it wants to know."""
        self._tell_core("connection_lost", now)

    def on_reconnected(self, now: float) -> None:
        """The bus is back, and messages were lost: by default the core is told."""
        self._tell_core("reconnected", now)

    # --- for the outside -----------------------------------------------------------------------

    def flush(self) -> None:
        """Publish what the core has put out. Call after touching the core outside the loop here."""
        if self.core is None:
            return
        for subject, message in self.core.outbox.take():
            self.publish(subject, message)

    def publish(self, subject: str, message: Message) -> None:
        """Send one message; one that the bus refuses fails the leg it is about."""
        try:
            self.bus.publish(subject, encode(message))
        except InvalidRequest as error:
            self.drop("unsendable")
            log.error(
                "unsendable", subject=subject, kind=type(message).__name__, error=error.detail
            )
            if not isinstance(message, Failed):
                self._fail_legs(message, "invalid_request", error.detail)

    def drop(self, reason: str) -> None:
        """Count a message that was not handled or not sent."""
        self.errors += 1
        self._counters[f"dropped_{reason}"] += 1

    def stop(self) -> None:
        """Drain, then end `run`."""
        self._stop.set()

    def hurry(self) -> None:
        """Wait for nobody any more: `drain` has had its time."""
        self._hurry.set()

    async def settled(self) -> None:
        """Return when nothing has arrived for a while and all that had is handled: whoever sends
        us work has heard by now that we drain.
        """
        seen = -1
        while seen != self._arrived or len(self._queue):
            seen = self._arrived
            await asyncio.sleep(SETTLED_S)

    def fail(self, error: Exception) -> None:
        """End `run` with `error` at once, without draining."""
        if self._fatal is None:
            self._fatal = error
        self._stop.set()
        self._hurry.set()

    def look_at_connection(self) -> None:
        """Notice that the bus went away or came back. The timer looks too; this is only sooner."""
        self._look(self.clock())
        self.flush()

    async def run(self) -> None:
        """Live until `stop()` (returns) or a failure (raises it)."""
        timer = asyncio.create_task(self._timer())
        start = asyncio.create_task(self._start())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({start, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                start.result()  # raises what start-up raised
            await stopping
            if self._fatal is not None:
                raise self._fatal
            await self._drain()
        finally:
            for task in (start, stopping):
                task.cancel()
            self.ready = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_S):
                    await self.on_stop()
            timer.cancel()
            await asyncio.gather(timer, start, stopping, return_exceptions=True)
            self.flush()

    # --- inside --------------------------------------------------------------------------------

    def _listens(self) -> list[str]:
        return [subjects.inbox(self.instance), subjects.everyone(self.role), *self.subjects()]

    async def _start(self) -> None:
        await self.on_start()
        for subject in self._listens():
            await self.bus.subscribe(subject, self._on_delivery)
        for subject in self._micro.subjects():
            await self.bus.subscribe(subject, self._on_question)
        self.ready = True
        self._report(self.clock())
        await self.on_ready()
        log.info("ready")

    async def _drain(self) -> None:
        self.draining = True
        log.info("draining")
        self._report(self.clock())
        draining = asyncio.create_task(self.drain())
        hurried = asyncio.create_task(self._hurry.wait())
        both = {draining, hurried}
        try:
            await asyncio.wait(both, timeout=self.drain_s, return_when=asyncio.FIRST_COMPLETED)
            if draining.done():
                draining.result()  # raises what it raised
            else:
                log.warning("drain_cut_off", hurried=hurried.done(), after_s=self.drain_s)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
        if self._fatal is not None:
            raise self._fatal
        await self.last_words()

    def _on_delivery(self, delivery: Delivery) -> None:
        self._arrived += 1
        try:
            self.on_payload(delivery.payload)
        except Exception as error:  # noqa: BLE001 our bug: who beats and handles nothing draws all work
            self._raised(error, handling="payload")

    def _on_question(self, delivery: Delivery) -> None:
        if delivery.reply:
            answer = self._micro.answer(delivery.subject, self._started, self.stats())
            self.bus.publish(delivery.reply, answer)

    def _work(self) -> None:
        """Handle what has arrived since the last turn of the loop."""
        self._work_scheduled = False
        now = self.clock()
        self._look(now)
        for _ in range(min(BATCH, len(self._queue))):
            [queued] = self._queue.take(1)
            self._handle(queued, now)
            if self._fatal is not None or self.clock() - now > TURN_S:
                break
        self.flush()
        if len(self._queue) and self._fatal is None:
            self._work_scheduled = True
            asyncio.get_running_loop().call_soon(self._work)

    def _handle(self, queued: Queued, now: float) -> None:
        message = queued.message
        remained = deadline_s(message)
        if remained is not None and now - queued.arrived > remained:
            self.drop("expired")
            self._fail_legs(message, "deadline_exceeded", f"waited too long in a {self.role}")
            return
        try:
            self.receive(message, now)
        except Exception as error:  # noqa: BLE001 our bug: the legs are told, then see `_raised`
            self._fail_legs(message, "internal", f"a {self.role} failed: {type(error).__name__}")
            self._raised(error, handling=type(message).__name__)
        else:
            self.handled += 1

    async def _timer(self) -> None:
        while True:
            self._due = self.clock() + self.tick_s
            await asyncio.sleep(self.tick_s)
            now = self.clock()
            metrics.TICK_LATENESS.labels(self.launch.name).observe(max(0.0, now - self._due))
            try:
                self._look(now)
                self.tick(now)
                self._report(now, only_due=True)
            except Exception as error:  # noqa: BLE001 our bug: see `_raised`
                self._raised(error, handling="tick")
            self.flush()

    def _look(self, now: float) -> None:
        """Before anything is judged: have I slept, has the connection been away?"""
        late = now - self._due
        up, reconnects = self.bus.connected, self.bus.reconnects
        if self._up and (not up or reconnects != self._reconnects):
            self._up = False
            log.warning("bus_down")
            self.on_disconnected(now)
        came_back = up and not self._up
        if came_back:
            self._up = True
            self._reconnects = reconnects
            log.info("bus_up", reconnects=reconnects)
            self.on_reconnected(now)
        if late > LATE_S or came_back or not up:
            if late > LATE_S:
                log.warning("slept", late_s=round(late, 3))
                self._counters["slept"] += 1
            self._due = now
            self._tell_core("slept", now)

    def _report(self, now: float, *, only_due: bool = False) -> None:
        """Heartbeat and status line."""
        soon = now + self.tick_s / 2  # a tick that comes a little early is not a tick too early
        if not only_due or soon >= self._next_beat:
            self._next_beat = now + self.beat_s
            self.publish(subjects.beat(self.role, self.instance), self.beat())
        if not only_due or soon >= self._next_status:
            self._next_status = now + STATUS_S
            self._write_status()

    def _write_status(self) -> None:
        if self.launch.status_fd is None:
            return
        (status := self.status()).extra["tasks"] = len(asyncio.all_tasks())  # a leak shows here
        # A full pipe means that the supervisor does not read now; it will see the next line.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self.launch.status_fd, msgspec.json.encode(status) + b"\n")

    def _tell_core(self, what: str, now: float) -> None:
        hook: Callable[[float], None] | None = getattr(self.core, what, None)
        if hook is not None:
            hook(now)

    def _fail_legs(self, message: Any, code: Code, detail: str) -> None:
        for named in named_by(message):
            leg = named._asdict()
            to = subjects.inbox(leg.pop("gateway"))
            self.publish(to, Failed(**leg, code=code, detail=detail, retryable=code == "internal"))

    def _raised(self, error: Exception, handling: str) -> None:
        self.drop("raised")
        log.error("core_raised", handling=handling, exc_info=error)
        if not self.survives_errors:
            self.fail(error)
