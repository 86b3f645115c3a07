"""The bus edge: other systems submit on `shoal.v1.generate` and read frames at their inbox.

A frame is one JSON (or MessagePack, as the request was) object: `request_id`, `index` from 0
without a gap, `event`, `data`. Events: `chunk` (OpenAI's chunk, or the whole answer), `error`
(OpenAI's error object), and `done`, always the last. Once a second an empty message is sent as a
request: two answers in a row that nobody listens cancel the request.
"""

import asyncio
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from services.gateway.edge import Edge, Open, new_request_id
from services.gateway.events import Delta, SessionEnd
from services.gateway.openai.answer import Answer
from services.gateway.openai.decode import decode
from services.gateway.openai.errors import error_body
from services.gateway.openai.request import Checked
from shared.bus import Bus, Delivery, Subscription
from shared.errors import DeadlineExceeded, MeshError, Overloaded, Unavailable
from shared.log import log
from shared.publish import is_inbox
from shared.subjects import GENERATE

ABSENT_MAX = 2  # probes in a row with nobody there
QUEUE = "gateways"

Event = Literal["chunk", "error", "done"]


class BusFields(Struct, kw_only=True):
    """What a submission says besides OpenAI's body."""

    endpoint: Literal["chat", "completions"] = "chat"
    api_key: str | None = None
    timeout_ms: int | None = None


class Frames:
    """Numbered frames to one inbox."""

    def __init__(self, bus: Bus, inbox: str, request_id: str, packed: bool) -> None:
        self.inbox = inbox
        self._bus = bus
        self._packed = packed
        self._id = msgspec.json.encode(request_id)
        self._index = 0

    def put(self, event: Event, data: bytes) -> None:
        """Send one frame; `data` is JSON."""
        frame = b'{"request_id":%b,"index":%d,"event":"%b","data":%b}' % (
            self._id,
            self._index,
            event.encode(),
            data,
        )
        if self._packed:
            frame = msgspec.msgpack.encode(msgspec.json.decode(frame))
        self._bus.publish(self.inbox, frame)
        self._index += 1

    def end(self, error: MeshError | None = None) -> None:
        """Send the last frames."""
        if error is not None:
            self.put("error", error_body(error))
        self.put("done", b"null")


class BusEdge:
    """Serves `edge` on the public subject; one task per request."""

    def __init__(self, edge: Edge, bus: Bus) -> None:
        self._edge = edge
        self._bus = bus
        self._config = edge.config
        self._tasks: set[asyncio.Task[None]] = set()
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        self._subscription = await self._bus.subscribe(GENERATE, self._on_submission, QUEUE)

    async def stop_listening(self) -> None:
        """Take no new submission; those open go on."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
            self._subscription = None

    async def close(self) -> None:
        """Cancel what still runs."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_submission(self, delivery: Delivery) -> None:
        if not is_inbox(delivery.reply):
            self._edge.meter.cut("bad_reply")
            return
        if len(self._tasks) >= self._config.sessions_max:
            frames = Frames(self._bus, delivery.reply, new_request_id(), packed=False)
            frames.end(Overloaded("Too many requests are open here.", retry_after_s=1.0))
            return
        task = asyncio.get_running_loop().create_task(self._serve(delivery))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, delivery: Delivery) -> None:
        body = delivery.payload
        packed = body[:1] >= b"\x80"  # no JSON text begins so, every MessagePack map does
        request_id = new_request_id()
        frames = Frames(self._bus, delivery.reply, request_id, packed)
        try:
            with self._edge.room(len(body)):
                async with self._edge.turn(len(body)):
                    checked = self._check(body, request_id, packed)
                with self._edge.open(checked) as asked:
                    answer = asked.answer(await self._edge.echoes(checked))
                    await Delivering(asked, answer, frames, self._bus).run()
        except MeshError as error:
            frames.end(error)
        except Exception as error:  # noqa: BLE001 our bug: say so in the log, not to the client
            log.error("submission_failed", exc_info=error)
            frames.end(MeshError("The server had an error. It has been logged."))

    def _check(self, body: bytes, request_id: str, packed: bool) -> Checked:
        edge = self._edge
        fields = decode(body, BusFields, packed)
        caller = edge.caller(edge.keys.tenant(fields.api_key), fields.timeout_ms)
        caller = replace(caller, request_id=request_id)
        return edge.check(fields.endpoint, body, caller, packed=packed, streams=True)


class Delivering:
    """One open request on its way to an inbox."""

    def __init__(self, asked: Open, answer: Answer, frames: Frames, bus: Bus) -> None:
        self._open = asked
        self._answer = answer
        self._frames = frames
        self._bus = bus

    async def run(self) -> None:
        """Deliver to the end; raises `MeshError` of the session, or when nobody listens."""
        prober = asyncio.create_task(self._probe())
        try:
            while True:
                for event in await self._open.feed.take(self._open.config.ping_bus_s):
                    if self._ends(event):
                        return
                if prober.done():
                    prober.result()
        finally:
            prober.cancel()

    def _ends(self, event: Delta | SessionEnd) -> bool:
        checked, answer = self._open.checked, self._answer
        if isinstance(event, Delta):
            if checked.stream:
                for chunk in answer.chunks(event):
                    self._frames.put("chunk", chunk)
            else:
                answer.add(event)
            return False
        if event.error is not None:
            raise event.error
        if not checked.stream:
            self._frames.put("chunk", answer.body(event))
        elif checked.include_usage:
            self._frames.put("chunk", answer.usage_chunk(event))
        self._frames.end()
        return True

    async def _probe(self) -> None:
        """Ask once a second whether anybody listens; raises `Unavailable` when nobody does."""
        config, absent = self._open.config, 0
        while True:
            await asyncio.sleep(config.ping_bus_s)
            try:
                await self._bus.request(self._frames.inbox, b"", config.probe_timeout_s)
                absent = 0
            except DeadlineExceeded:
                absent = 0  # somebody listens and need not answer
            except Unavailable:
                absent = absent + 1 if self._bus.connected else 0
            if absent >= ABSENT_MAX:
                self._open.meter.cut("nobody_listens")
                raise Unavailable("Nobody listens at the inbox.")
