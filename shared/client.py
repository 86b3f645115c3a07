"""The small client for other Python systems: submit over the bus, read the stream.

    client = Client(bus)
    async for chunk in client.chat(messages=[{"role": "user", "content": "Hi"}]):
        print(chunk["choices"][0]["delta"].get("content", ""), end="")

Chunks are OpenAI's objects as plain dicts. Leaving the loop early cancels the request. Frames that
were lost, in a reconnect or otherwise, are asked for again.

A stored request runs whether anybody reads it or not, and survives the gateway that took it:

    request_id = await client.submit(messages=[...], key="order-17")
    async for chunk in client.follow(request_id): ...
"""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shared.bus import Bus, Delivery
from shared.errors import DeadlineExceeded, MeshError, Unavailable
from shared.subjects import GENERATE, JOBS, REPLAY

SILENCE_S = 10.0  # a live gateway says something (a probe, at least) every second
REPAIR_S = 2.5  # after so much of it the rest is asked for again
AGAIN_S = 1.0  # and again
GAP_S = 0.1  # a gap is asked for so often at first: not once for each frame behind it
GAP_MAX_S = 2.0
ASKS_MAX = 8  # for one frame: ten seconds
SUBMITS_MAX = 6
SUBMIT_S = 2.0  # for a submission to be answered; then it is sent again, under the same key
BUFFER_MAX = 8192  # frames a reader may lag behind

GRACE_S = 1.0  # the gateway ends a request at its deadline and says so; wait for that word

Endpoint = Literal["chat", "completions"]
Chunks = AsyncGenerator[dict[str, Any], None]


class RequestFailed(MeshError):
    """The mesh answered with an error; `openai_code` and `kind` are its `code` and `type`."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(str(error.get("message")), param=error.get("param"))
        self.openai_code = error.get("code")
        self.kind = error.get("type")


class FramesLost(MeshError):
    """A frame is missing: what follows would be another text than the one generated."""

    code = "unavailable"
    status = 503


class Frame(Struct, frozen=True, kw_only=True):
    """One message of an answer, numbered from 0 without a gap; `done` is the last."""

    request_id: str
    index: int
    event: Literal["chunk", "error", "done", "job"]
    data: Any = None


class Client:
    """Requests over `bus`, which the caller connects (as an outsider) and closes."""

    def __init__(self, bus: Bus, *, model: str | None = None, api_key: str | None = None) -> None:
        self._bus = bus
        self._defaults: dict[str, Any] = {}
        if model is not None:
            self._defaults["model"] = model
        if api_key is not None:
            self._defaults["api_key"] = api_key

    def chat(self, *, timeout_s: float = 600.0, **body: Any) -> Chunks:
        """Chunks of a chat completion; `body` as for OpenAI's API.

        Raises `RequestFailed`, `FramesLost`, `Unavailable` when nobody serves, `DeadlineExceeded`.
        """
        return self._chunks("chat", {"stream": True, **body}, timeout_s)

    def complete(self, *, timeout_s: float = 600.0, **body: Any) -> Chunks:
        """Chunks of a completion; as `chat`."""
        return self._chunks("completions", {"stream": True, **body}, timeout_s)

    async def whole(
        self, endpoint: Endpoint, *, timeout_s: float = 600.0, **body: Any
    ) -> dict[str, Any]:
        """The whole answer as one object; raises as `chat` does."""
        async with aclosing(self._chunks(endpoint, {**body, "stream": False}, timeout_s)) as chunks:
            async for answer in chunks:
                return answer
        raise FramesLost("The answer ended before it began.")

    async def submit(
        self,
        endpoint: Endpoint = "chat",
        *,
        key: str | None = None,
        timeout_s: float = 600.0,
        **body: Any,
    ) -> str:
        """Have a request run and its answer kept; its id, for `follow`. The same `key` with the
        same body is the same request. Raises `RequestFailed`, `Unavailable` when nobody answers.
        """
        asked = {"stream": True, "timeout_ms": int(timeout_s * 1000), **self._defaults, **body}
        asked |= {"endpoint": endpoint, "idempotency_key": key or secrets.token_hex(16)}
        for _ in range(SUBMITS_MAX):
            frames = Frames(time.monotonic() + SUBMIT_S)
            async with self._inbox(frames) as inbox:
                self._bus.publish(JOBS, msgspec.msgpack.encode(asked), inbox)
                try:
                    frame = await frames.next()
                except (DeadlineExceeded, Unavailable):
                    continue
            assert frame is not None, "nothing is asked for again before the first frame"
            if frame.event == "error":
                raise RequestFailed(frame.data["error"])
            return frame.request_id
        raise Unavailable("No gateway answered a submission.", retry_after_s=1.0)

    async def follow(self, request_id: str, *, timeout_s: float = 600.0) -> Chunks:
        """The chunks of a request from its first on, stored or just answered; raises as `chat`."""
        frames = Frames(time.monotonic() + timeout_s + GRACE_S, request_id)
        async with self._inbox(frames) as inbox, aclosing(self._read(frames, inbox)) as chunks:
            self._ask_again(frames, inbox)
            async for chunk in chunks:
                yield chunk

    async def _chunks(self, endpoint: Endpoint, body: dict[str, Any], timeout_s: float) -> Chunks:
        frames = Frames(time.monotonic() + timeout_s + GRACE_S)
        async with self._inbox(frames) as inbox, aclosing(self._read(frames, inbox)) as chunks:
            asked = {"timeout_ms": int(timeout_s * 1000), **self._defaults, **body}
            asked["endpoint"] = endpoint
            self._bus.publish(GENERATE, msgspec.msgpack.encode(asked), inbox)
            async for chunk in chunks:
                yield chunk

    @asynccontextmanager
    async def _inbox(self, frames: "Frames") -> AsyncGenerator[str]:
        inbox = f"_INBOX.{secrets.token_hex(16)}"
        subscription = await self._bus.subscribe(inbox, frames.take)
        try:
            yield inbox
        finally:
            await subscription.unsubscribe()

    async def _read(self, frames: "Frames", inbox: str) -> Chunks:
        while (frame := await frames.next()) is None or frame.event != "done":
            if frame is None:
                self._ask_again(frames, inbox)
            elif frame.event == "error":
                raise RequestFailed(frame.data["error"])
            else:
                yield frame.data

    def _ask_again(self, frames: "Frames", inbox: str) -> None:
        asked = {"request_id": frames.request_id, "from": frames.expected}
        if "api_key" in self._defaults:
            asked["api_key"] = self._defaults["api_key"]
        self._bus.publish(REPLAY, msgspec.msgpack.encode(asked), inbox)


class Frames:
    """Frames of one answer in order. What is missing is noticed by a gap, or by a silence."""

    def __init__(self, deadline: float, request_id: str = "") -> None:
        self.request_id = request_id  # "" = no frame has named it yet
        self.expected = 0
        self._deadline = deadline
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._waiting: deque[Frame] = deque()
        self._error: MeshError | None = None
        self._gap, self._gap_wait_s = False, GAP_S
        self._asks = 0  # for the same frame
        self._unknown: Frame | None = None  # what somebody said who was asked and has no frames
        self._heard = asyncio.Event()
        self._heard_at = time.monotonic()
        self._asked_at = self._heard_at

    def take(self, delivery: Delivery) -> None:
        """One message at the inbox."""
        self._heard.set()
        self._heard_at = time.monotonic()
        if self._error is not None:
            return
        if not delivery.payload:
            if not delivery.reply:  # with one it is the gateway's probe: to have heard it is all
                self._error = Unavailable("Nobody serves requests on the bus.", retry_after_s=1.0)
            return
        try:
            frame = self._decoder.decode(delivery.payload)
        except msgspec.MsgspecError as error:
            self._error = FramesLost(f"A frame could not be read: {error}.")
            return
        self.request_id = self.request_id or frame.request_id
        if frame.index < self.expected:
            return
        if frame.index > self.expected:
            self._gap = True
        elif self._asks and is_unknown(frame):
            self._unknown = frame  # whoever has them may be away for now
        elif len(self._waiting) >= BUFFER_MAX:
            self._error = FramesLost(f"The reader is {BUFFER_MAX} frames behind.")
        else:
            self._gap, self._gap_wait_s, self._asks, self._unknown = False, GAP_S, 0, None
            self.expected += 1
            self._waiting.append(frame)

    async def next(self) -> Frame | None:
        """The next frame; None when it has to be asked for again. Those that came before an error
        are given first.
        """
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._heard.clear()
            now = time.monotonic()
            if now >= self._deadline:
                raise DeadlineExceeded("The answer did not end in time.")
            if now - self._heard_at >= SILENCE_S:
                raise Unavailable(f"The gateway was silent for {SILENCE_S:g} s.")
            silence_s = now - max(self._heard_at, self._asked_at)
            gap_s = now - self._asked_at if self._gap else 0.0
            # Whoever was asked may hang: it is not waited for as long as before the first question.
            patience_s = AGAIN_S if self._asks else REPAIR_S
            if self.request_id and (gap_s >= self._gap_wait_s or silence_s >= patience_s):
                if self._asks == ASKS_MAX and self._unknown is not None:
                    return self._unknown
                if self._asks == ASKS_MAX:
                    raise FramesLost(f"Frame {self.expected} is missing and does not come again.")
                self._asked_at = now
                self._asks += 1
                self._gap_wait_s = min(self._gap_wait_s * 2, GAP_MAX_S)
                return None
            wait_s = min(self._gap_wait_s if self._gap else patience_s, SILENCE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, self._deadline - now)):
                    await self._heard.wait()
        return self._waiting.popleft()


def is_unknown(frame: Frame) -> bool:
    """Whether it says that there is no such request."""
    return frame.event == "error" and frame.data["error"].get("code") == "not_found"
