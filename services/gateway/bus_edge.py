"""The bus edge: other systems submit on `shoal.v1.generate` and read frames at their inbox.

A frame is one JSON (or MessagePack, as the request was) object: `request_id`, `index` from 0
without a gap, `event`, `data`. Events: `chunk` (OpenAI's chunk, or the whole answer), `error`
(OpenAI's error object), and `done`, always the last. Once a second an empty message is sent as a
request: two answers in a row that nobody listens cancel the request.

`shoal.v1.jobs` takes a stored request; the answer is one frame, event `job`, with its id and
status. `shoal.v1.replay` sends the frames of a request from a number on, and all that follow: of a
stored one from its log, of a plain one for as long as its gateway has them.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from services.gateway.delivering import Delivering, Events, live
from services.gateway.edge import Edge, new_request_id
from services.gateway.frames import Frames, Kept
from services.gateway.openai.answer import answer
from services.gateway.openai.decode import decode
from services.gateway.openai.request import Caller
from services.gateway.stored.events import Submitted, session_events
from services.gateway.stored.store import Logged
from shared.bus import Bus, Delivery, Handler, Subscription
from shared.errors import (
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    NotFound,
    Overloaded,
    Unavailable,
)
from shared.log import log as logger
from shared.publish import is_inbox
from shared.subjects import GENERATE, JOBS, OWNED, REPLAY

QUEUE = "gateways"
OWNER_S = 0.5  # for the gateway that has the frames of a request to say so
OURS = ("endpoint", "api_key", "timeout_ms", "idempotency_key")  # of a body, not OpenAI's

Serve = Callable[[bytes, Frames], Awaitable[None]]


class BusFields(Struct, kw_only=True):
    """What a submission says besides OpenAI's body."""

    endpoint: Literal["chat", "completions"] = "chat"
    api_key: str | None = None
    timeout_ms: int | None = None


class JobFields(BusFields, kw_only=True):
    """The same for a stored one; a key that comes again names the request it came with first."""

    idempotency_key: Annotated[str, Meta(min_length=1, max_length=256)] | None = None


class ReplayFields(Struct, kw_only=True):
    """Which frames of which request."""

    request_id: Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
    start: Annotated[int, Meta(ge=0, lt=2**53)] = msgspec.field(name="from", default=0)
    api_key: str | None = None


class Owned(Struct, frozen=True):
    """gateway -> all gateways: whoever has these frames sends them, and answers."""

    request_id: str
    tenant: str
    start: int
    inbox: str


class BusEdge:
    """Serves `edge` on the public subjects; one task per request."""

    def __init__(self, edge: Edge, bus: Bus) -> None:
        self._edge = edge
        self._bus = bus
        self._config = edge.config
        self._kept = Kept()
        self._tasks: set[asyncio.Task[None]] = set()
        self._replays: dict[str, asyncio.Task[Any]] = {}  # from a log, by inbox
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        serves = {GENERATE: self._generate, JOBS: self._job, REPLAY: self._replay}
        for subject, serve in serves.items():
            handler = self._handler(serve)
            self._subscriptions.append(await self._bus.subscribe(subject, handler, QUEUE))
        await self._bus.subscribe(OWNED, self._on_owned)

    async def stop_listening(self) -> None:
        """Take no new submission; those open go on."""
        subscriptions, self._subscriptions = self._subscriptions, []
        for subscription in subscriptions:
            await subscription.unsubscribe()

    async def idle(self) -> None:
        """Return when every submission has been served."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _handler(self, serve: Serve) -> Handler:
        def handle(delivery: Delivery) -> None:
            if not is_inbox(delivery.reply):
                self._edge.meter.cut("bad_reply")
                return
            body = delivery.payload
            packed = body[:1] >= b"\x80"  # no JSON text begins so, every MessagePack map does
            frames = Frames(self._bus, delivery.reply, new_request_id(), packed=packed)
            if len(self._tasks) >= self._config.sessions_max:
                frames.end(Overloaded("Too many requests are open here.", retry_after_s=1.0))
                return
            task = asyncio.get_running_loop().create_task(self._guarded(serve, body, frames))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        return handle

    async def _guarded(self, serve: Serve, body: bytes, frames: Frames) -> None:
        try:
            with self._edge.room(len(body)):
                await serve(body, frames)
        except MeshError as error:
            frames.end(error)
        except Exception as error:  # noqa: BLE001 our bug: say so in the log, not to the client
            logger.error("submission_failed", exc_info=error)
            frames.end(MeshError("The server had an error. It has been logged."))
        finally:
            self._kept.ended(frames)

    # --- submissions ---

    async def _generate(self, body: bytes, frames: Frames) -> None:
        edge = self._edge
        async with edge.turn(len(body)):
            fields = decode(body, BusFields, frames.packed)
            caller = self._caller(fields, frames.request_id)
            checked = edge.check(fields.endpoint, body, caller, packed=frames.packed, streams=True)
        frames.keep(self._kept, caller.tenant)
        with edge.open(checked) as asked:
            told = asked.answer(await edge.echoes(checked))
            delivering = Delivering(checked, told, frames, self._bus)
            await delivering.run(live(asked), self._config, edge.meter)

    async def _job(self, body: bytes, frames: Frames) -> None:
        edge = self._edge
        async with edge.turn(len(body)):
            fields = decode(body, JobFields, frames.packed)
            caller = self._caller(fields, "")
            key = fields.idempotency_key
            frames.request_id = edge.stored_id(caller.tenant, key)
            kept = without_ours(body, frames.packed)
            asked = Submitted(
                tenant=caller.tenant,
                endpoint=fields.endpoint,
                body=kept,
                created=time.time(),
                timeout_s=caller.timeout_s,
            )
            edge.stored(frames.request_id, asked)
        told = await edge.parts.store.submit(frames.request_id, asked, keyed=key is not None)
        status = {"id": frames.request_id, "status": told.status}
        frames.put("job", msgspec.json.encode(status))

    def _caller(self, fields: BusFields, request_id: str) -> Caller:
        edge = self._edge
        caller = edge.caller(edge.keys.tenant(fields.api_key), fields.timeout_ms)
        return replace(caller, request_id=request_id)

    # --- replay ---

    async def _replay(self, body: bytes, frames: Frames) -> None:
        fields = decode(body, ReplayFields, frames.packed)
        tenant = self._edge.keys.tenant(fields.api_key)
        frames.request_id, frames.index = fields.request_id, fields.start
        asked = Owned(fields.request_id, tenant, fields.start, frames.inbox)
        if self._send_owned(asked):
            return
        log = self._edge.parts.store.follow(fields.request_id, tenant)
        async with aclosing(log) as logged:
            try:
                first = await anext(logged)
            except (NotFound, Unavailable) as error:
                await self._ask_owner(asked, error)
                return
            assert isinstance(first.event, Submitted)
            async with self._only_one(frames.inbox):
                await self._send_stored(first.event, logged, frames)

    @asynccontextmanager
    async def _only_one(self, inbox: str) -> AsyncGenerator[None]:
        """A reader that asks again has no use for what it is still sent for its last question; not
        before there is something to send instead, or a hasty one would never get anything.
        """
        task = asyncio.current_task()
        assert task is not None
        if inbox in self._replays:
            self._replays[inbox].cancel()
        self._replays[inbox] = task
        try:
            yield
        finally:
            if self._replays[inbox] is task:
                del self._replays[inbox]

    async def _send_stored(
        self, asked: Submitted, logged: AsyncGenerator[Logged], frames: Frames
    ) -> None:
        """The frames that the log makes are the same whoever reads it."""
        edge = self._edge
        if asked.endpoint not in ("chat", "completions"):
            raise InvalidRequest("The request can only be read over HTTP.", param="request_id")
        checked = edge.stored(frames.request_id, asked, streams=True)
        whole = frames.from_start()
        told = answer(checked, int(asked.created), await edge.echoes(checked))
        try:
            await Delivering(checked, told, whole, self._bus).run(
                of_log(logged), self._config, edge.meter
            )
        except MeshError as error:
            if whole.index < frames.index:
                raise
            whole.end(error)

    async def _ask_owner(self, asked: Owned, otherwise: MeshError) -> None:
        """Another gateway may have the frames; `otherwise` is why there are no others."""
        try:
            await self._bus.request(OWNED, msgspec.msgpack.encode(asked), OWNER_S)
        except (DeadlineExceeded, Unavailable):
            raise otherwise from None

    def _on_owned(self, delivery: Delivery) -> None:
        if self._send_owned(msgspec.msgpack.decode(delivery.payload, type=Owned)):
            self._bus.publish(delivery.reply, b"+OK")

    def _send_owned(self, asked: Owned) -> bool:
        frames = self._kept.find(asked.request_id, asked.tenant)
        if frames is not None:
            frames.again(asked.inbox, asked.start)
        return frames is not None


async def of_log(logged: AsyncGenerator[Logged]) -> Events:
    """The events of a log, as they come."""
    async for _, event in logged:
        yield session_events(event)


def without_ours(body: bytes, packed: bool) -> bytes:
    """OpenAI's part of a body: what is kept holds no key of the client's."""
    fields = decode(body, dict[str, Any], packed)
    for name in OURS:
        fields.pop(name, None)
    return msgspec.msgpack.encode(fields) if packed else msgspec.json.encode(fields)
