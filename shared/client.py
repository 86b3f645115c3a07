"""The small client for other Python systems: submit over the bus, read the stream.

    client = Client(bus)
    async for chunk in client.chat(messages=[{"role": "user", "content": "Hi"}]):
        print(chunk["choices"][0]["delta"].get("content", ""), end="")

Chunks are OpenAI's objects as plain dicts. Leaving the loop early cancels the request.
"""

import asyncio
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal

import msgspec
from msgspec import Struct

from shared.bus import Bus, Delivery
from shared.errors import DeadlineExceeded, MeshError, Unavailable
from shared.subjects import GENERATE

SILENCE_S = 10.0  # a live gateway says something (a probe, at least) every second
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
    event: Literal["chunk", "error", "done"]
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

    async def _chunks(self, endpoint: Endpoint, body: dict[str, Any], timeout_s: float) -> Chunks:
        inbox = f"_INBOX.{secrets.token_hex(16)}"
        frames = Frames(self._bus, time.monotonic() + timeout_s + GRACE_S)
        subscription = await self._bus.subscribe(inbox, frames.take)
        try:
            asked = {"timeout_ms": int(timeout_s * 1000), **self._defaults, **body}
            asked["endpoint"] = endpoint
            self._bus.publish(GENERATE, msgspec.msgpack.encode(asked), inbox)
            while (frame := await frames.next()).event != "done":
                if frame.event == "error":
                    raise RequestFailed(frame.data["error"])
                yield frame.data
        finally:
            await subscription.unsubscribe()


class Frames:
    """Frames of one answer in order; a gap, a silence or nobody at all is an error."""

    def __init__(self, bus: Bus, deadline: float) -> None:
        self._bus = bus
        self._deadline = deadline
        self._decoder = msgspec.msgpack.Decoder(Frame)
        self._waiting: deque[Frame] = deque()
        self._error: MeshError | None = None
        self._next = 0
        self._heard = asyncio.Event()

    def take(self, delivery: Delivery) -> None:
        """One message at the inbox."""
        self._heard.set()
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
        if frame.index < self._next:
            return
        if frame.index > self._next:
            self._error = FramesLost(f"Frame {self._next} is missing, {frame.index} came.")
        elif len(self._waiting) >= BUFFER_MAX:
            self._error = FramesLost(f"The reader is {BUFFER_MAX} frames behind.")
        else:
            self._next += 1
            self._waiting.append(frame)

    async def next(self) -> Frame:
        """The next frame; those that came before an error are given first."""
        while not self._waiting:
            if self._error is not None:
                raise self._error
            self._heard.clear()
            remaining_s = self._deadline - time.monotonic()
            try:
                async with asyncio.timeout(min(SILENCE_S, remaining_s)):
                    await self._heard.wait()
            except TimeoutError:
                if remaining_s <= SILENCE_S:
                    raise DeadlineExceeded("The answer did not end in time.") from None
                raise Unavailable(f"The gateway was silent for {SILENCE_S:g} s.") from None
        return self._waiting.popleft()
