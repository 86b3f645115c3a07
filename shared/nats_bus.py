"""The bus on NATS: nats-py 2.16, hardened. The only module that knows nats-py.

nats-py 2.16 loses messages or hangs in eight ways that were reproduced against a real server
(D1-D8 below; `tests/shared/test_nats_bus_defects.py` has each). The cures reach into private
names, so the version is pinned. Every such name is explained where it is used first.

D1 flush sends its PING before queued data   D5 reconnect waits for a stalled peer to close
D2 a late PONG kills the read loop           D6 a handler's CancelledError ends its subscription
D3 a raising error callback kills it too     D7 payload over the limit with headers: closed for good
D4 so drain loses what was on its way        D8 one task per subscription awaits each handler
"""

import asyncio
import contextlib
import itertools
import random
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from nats.aio.client import Client, Srv
from nats.aio.subscription import Subscription as NatsSubscription
from nats.aio.transport import TcpTransport
from nats.errors import Error, NoServersError

from shared.bus import Delivery, Handler, Headers
from shared.clock import monotonic
from shared.errors import DeadlineExceeded, Unavailable
from shared.log import Throttle, log
from shared.publish import publish_command, write_headers
from shared.subjects import PRIVATE_INBOX

MAX_PENDING = 32 * 1024 * 1024  # bytes not yet given to the kernel: four of the largest messages
PING_S = 1.0  # a silent server is given up after PINGS_OUT + 1 of these
PINGS_OUT = 2
RECONNECT_FIRST_S = 0.02
RECONNECT_MAX_S = 1.0
WATCHDOG_S = 1.0
CLOSE_S = 3.0


class _AbortTransport(TcpTransport):
    """D5: while reconnecting, `wait_closed` never returns if the old peer does not take what is
    buffered for it. Aborting throws the buffer away; it is lost in either case.
    """

    client: "_Client"

    def close(self) -> None:
        if self.client.is_reconnecting:
            self.client.abort()
        else:
            super().close()  # type: ignore[no-untyped-call] # nats-py is half typed


class _Client(Client):
    """nats-py's connection, with handlers called straight from its read loop.

    That needs no task and no queue per subscription, so D6, D8 and the dropping of messages
    between them are gone: the actor's mailbox is the one queue, and a handler returns at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handlers: dict[int, Handler] = {}
        self.no_responders: Callable[[str], None] = lambda _subject: None

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes | None
    ) -> None:
        """Called by the parser for each message, in the order of the wire."""
        if (handler := self.handlers.get(sid)) is None:
            return
        if headers and not data and headers.startswith(b"NATS/1.0 503"):
            self.no_responders(subject.decode())
            return
        try:
            handler(Delivery(subject.decode(), data, reply.decode(), headers or b""))
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 it would end the loop
            log.error("handler_raised", subject=subject.decode(), exc_info=error)

    async def _process_pong(self) -> None:
        """D2: the future of a flush that gave up is done already. `_pongs` holds one future per
        PING sent, oldest first; the other two are what the ping loop judges staleness by.
        """
        if self._pongs:
            future = self._pongs.pop(0)
            if not future.done():
                future.set_result(True)
            self._pongs_received += 1
            self._pings_outstanding = 0

    async def _send_ping(self, future: asyncio.Future[bool] | None = None) -> None:
        """D1, D4: the PING takes its place behind what is queued. Not through `_send_command`,
        which may block the ping loop, and then a stalled server is never found out.
        """
        self._pongs.append(future or asyncio.get_running_loop().create_future())
        self.queue(b"PING\r\n")

    def queue(self, command: bytes) -> None:
        """Send at the next turn of the loop, behind what is queued. `_pending` is written by the
        `_flusher` task with one `writelines` whenever something is in `_flush_queue`; while not
        connected it only grows, and reconnecting kicks the flusher.
        """
        assert self._flush_queue is not None
        self._pending.append(command)
        self._pending_data_size += len(command)
        if self.is_connected and self._flush_queue.empty():
            self._flush_queue.put_nowait(asyncio.get_running_loop().create_future())

    async def _connect_to_server(self, server: Srv) -> None:
        """Opens the socket. Backoff for the attempt after this one: the first ones follow within
        tens of milliseconds (a restarted server is back in 50), later ones once a second.
        """
        wait = min(RECONNECT_MAX_S, RECONNECT_FIRST_S * 2 ** min(server.reconnects, 6))
        self.options["reconnect_time_wait"] = wait * random.uniform(0.5, 1.5)  # noqa: S311 jitter
        self.abort()  # of an attempt that got half way
        await super()._connect_to_server(server)
        if type(self._transport) is TcpTransport:
            self._transport.__class__ = _AbortTransport
            self._transport.client = self  # type: ignore[attr-defined]

    async def _process_connect_init(self) -> None:
        """The handshake; it starts new tasks and forgets the old `_pongs` and, if an earlier
        handshake got half way, the tasks of that one. What waits on those PINGs asks again, and
        PINGs still queued go, so that every PONG meets its own future.
        """
        for task in self.tasks() - {self._reconnection_task}:
            task.cancel()
        waiting = self._pongs
        await super()._process_connect_init()
        self._pending = [command for command in self._pending if command != b"PING\r\n"]
        for future in waiting:
            if not future.done():
                future.set_result(False)

    def broken(self) -> bool:
        """Is a task dead that the state says must live?"""
        if self.is_reconnecting:
            return self._reconnection_task is None or self._reconnection_task.done()
        running = self.tasks() - {self._reconnection_task}
        return self.is_connected and any(task.done() for task in running)

    def tasks(self) -> set[asyncio.Task[None]]:
        """Those that read, write, ping and reconnect."""
        tasks = {self._reading_task, self._flusher_task, self._ping_interval_task}
        return {task for task in {*tasks, self._reconnection_task} if task is not None}

    def abort(self) -> None:
        """Throw the socket away."""
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


class NatsSub:
    """One subscription of a `NatsBus`."""

    def __init__(self, bus: "NatsBus", sid: int) -> None:
        self._bus = bus
        self._sid = sid

    async def unsubscribe(self) -> None:
        await self._bus._unsubscribe(self._sid)


class NatsBus:
    """`shared.bus.Bus` on one NATS connection that never gives up.

    `on_disconnected` and `on_reconnected` are called on the loop; `on_closed(reason)` when the
    server has closed the connection for good (credentials, protocol violation): the process
    cannot go on and should end, so that the supervisor starts it afresh.
    """

    def __init__(self) -> None:
        self.on_disconnected: Callable[[], None] = lambda: None
        self.on_reconnected: Callable[[], None] = lambda: None
        self.on_closed: Callable[[str], None] = lambda _reason: None
        self.counters: Counter[str] = Counter()  # dropped_publishes, errors, reconnects, revived
        self._client = _Client()
        self._up = False
        self._closing = False
        self._last_error = "no answer"
        self._throttle = Throttle()
        self._inbox = f"{PRIVATE_INBOX}.{secrets.token_hex(12)}"
        self._numbers = itertools.count()
        self._requests: dict[str, asyncio.Future[Delivery]] = {}
        self._watchdog: asyncio.Task[None] | None = None

    @classmethod
    async def connect(
        cls,
        url: str,
        user: str,
        password: str,
        *,
        name: str,
        timeout_s: float = 10.0,
        **options: Any,
    ) -> "NatsBus":
        """Connect within `timeout_s`; raises `Unavailable` that says what stood in the way."""
        bus = cls()
        deadline = monotonic() + timeout_s
        while True:
            try:
                await bus._open(url, user=user, password=password, name=name, **options)
                break
            except (OSError, Error) as error:
                bus._client.abort()
                # NoServersError says less than the error that led to it.
                why = bus._last_error if isinstance(error, NoServersError) else str(error)
                if monotonic() > deadline or "authorization" in why.lower():
                    raise Unavailable(f"NATS at {url}: {why}") from None
            await asyncio.sleep(RECONNECT_FIRST_S)
        bus._up = True
        bus._watchdog = asyncio.create_task(bus._watch())
        return bus

    async def _open(self, url: str, **options: Any) -> None:
        """One try; each on a new client, which leaves no half-way state behind."""
        client = self._client = _Client()
        client.no_responders = self._nobody
        await client.connect(
            url,
            error_cb=self._error,
            disconnected_cb=_called(self._lost),
            reconnected_cb=_called(self._back),
            closed_cb=_called(self._closed),
            max_outstanding_pings=PINGS_OUT,
            connect_timeout=1,
            pending_size=0,  # no forced, waiting flush: `publish` has its own limit
            max_reconnect_attempts=1,
            allow_reconnect=False,
            **{"ping_interval": PING_S, **options},
        )
        client.options["allow_reconnect"] = True
        client.options["max_reconnect_attempts"] = -1  # the default of 60 closes for good

    @property
    def connected(self) -> bool:
        return self._up and bool(self._client.is_connected)

    @property
    def reconnects(self) -> int:
        return self.counters["reconnects"]

    @property
    def max_payload(self) -> int:
        return int(self._client.max_payload)

    def publish(
        self, subject: str, payload: bytes, reply: str = "", headers: Headers = None
    ) -> None:
        delivery = Delivery(subject, payload, reply, write_headers(headers))
        command = publish_command(delivery, self.max_payload)
        if self._client.pending_data_size + len(command) > MAX_PENDING or self._closing:
            self.counters["dropped_publishes"] += 1
            return
        self._client.queue(command)

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> NatsSub:
        """Raises `DeadlineExceeded` when the server does not confirm."""
        sid = self._subscribe(subject, handler, queue)
        try:
            await self.flush()
        except DeadlineExceeded:
            self._forget(sid)
            raise
        return NatsSub(self, sid)

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: Headers = None
    ) -> Delivery:
        if (number := next(self._numbers)) == 0:  # not before: outsiders may not listen there
            self._subscribe(f"{self._inbox}.*", self._answered)
        inbox = f"{self._inbox}.{number}"
        answer: asyncio.Future[Delivery] = asyncio.get_running_loop().create_future()
        self._requests[inbox] = answer
        try:
            self.publish(subject, payload, inbox, headers)
            async with asyncio.timeout(timeout_s):
                delivery = await answer
        except TimeoutError:
            raise DeadlineExceeded(f"no answer on {subject} within {timeout_s} s") from None
        finally:
            del self._requests[inbox]
        if delivery.subject == "":
            raise Unavailable(f"nobody listens on {subject}")
        return delivery

    async def flush(self, timeout_s: float = 2.0) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                ponged = False
                while not ponged:  # False: the connection was replaced, ask the new one
                    future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
                    await self._client._send_ping(future)
                    ponged = await future
        except TimeoutError:
            raise DeadlineExceeded(f"the bus did not answer within {timeout_s} s") from None

    async def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self.connected:
            for sid in self._client.handlers:
                self._client.queue(f"UNSUB {sid}\r\n".encode())
            with contextlib.suppress(DeadlineExceeded):
                await self.flush(CLOSE_S / 2)  # behind the UNSUBs: what was on its way is here
        self._closing = True
        # nats-py swallows cancellation in places, so a time limit around it would not hold.
        closing = asyncio.create_task(self._client.close())
        await asyncio.wait({closing}, timeout=CLOSE_S / 2)
        self._client.handlers.clear()
        self._client.abort()
        tasks = {closing, *self._client.tasks()}
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=CLOSE_S)
        await asyncio.gather(*(task for task in tasks if task.done()), return_exceptions=True)
        self._client.abort()  # of a reconnect that was half way

    # --- inside --------------------------------------------------------------------------------

    def _subscribe(self, subject: str, handler: Handler, queue: str = "") -> int:
        client = self._client
        sid = client._sid = client._sid + 1  # its counter; on reconnect it replays `_subs`
        client.handlers[sid] = handler
        client._subs[sid] = NatsSubscription(client, sid, subject, queue=queue)
        client.queue(f"SUB {subject} {queue} {sid}\r\n".encode())
        return sid

    async def _unsubscribe(self, sid: int) -> None:
        """What the server had sent before it knew is still handled (D4)."""
        if sid in self._client.handlers:
            self._client.queue(f"UNSUB {sid}\r\n".encode())
            with contextlib.suppress(DeadlineExceeded):
                await self.flush()
            self._forget(sid)

    def _forget(self, sid: int) -> None:
        self._client.handlers.pop(sid, None)
        self._client._subs.pop(sid, None)

    def _answered(self, delivery: Delivery) -> None:
        waiting = self._requests.get(delivery.subject)
        if waiting is not None and not waiting.done():
            waiting.set_result(delivery)

    def _nobody(self, inbox: str) -> None:
        """The server says that nobody listens to what was asked with this reply subject."""
        waiting = self._requests.get(inbox)
        if waiting is not None and not waiting.done():
            waiting.set_result(Delivery("", b""))

    async def _error(self, error: Exception) -> None:
        """D3: called from the read loop, so it must never raise."""
        self._last_error = str(error) or type(error).__name__
        self.counters["errors"] += 1
        self._throttle.warning("bus_error", monotonic(), error=self._last_error)

    def _lost(self) -> None:
        self._up = False
        self.on_disconnected()

    def _back(self) -> None:
        self._up = True
        self.counters["reconnects"] += 1
        self.on_reconnected()

    def _closed(self) -> None:
        self._up = False
        if not self._closing:
            self.on_closed(str(self._client.last_error or self._last_error))

    async def _watch(self) -> None:
        """The last net, for a defect nobody has met yet."""
        while True:
            await asyncio.sleep(WATCHDOG_S)
            if not self._client.broken():
                continue
            self.counters["revived"] += 1
            log.error("bus_revived", error=self._last_error)
            if self._client.is_reconnecting:
                self.on_closed("the task that reconnects has died")
                return
            await self._client.force_reconnect()


def _called(hook: Callable[[], None]) -> Callable[[], Awaitable[None]]:
    """`hook` as nats-py wants its callbacks; never raises into its loops."""

    async def call() -> None:
        try:
            hook()
        except Exception as error:  # noqa: BLE001 a raise here would stop the reconnect
            log.error("bus_hook_raised", exc_info=error)

    return call
