"""Frames of an answer on the bus, and those that may be asked for again."""

import time
from collections import OrderedDict, deque
from typing import Literal

import msgspec

from services.gateway.openai.errors import error_body
from shared.bus import Bus
from shared.errors import MeshError, Unavailable

KEPT_S = 30.0  # the frames of a request after its end, for a client that was cut off meanwhile
KEPT_BYTES_MAX = 64 << 20  # of all requests together; then those that ended first go first
REQUEST_BYTES_MAX = 256 << 10  # of one: a thousand frames, more than a client may miss

Event = Literal["chunk", "error", "done", "job"]


class Frames:
    """Numbered frames to one inbox, from number `start` on. With `kept` they may be asked for again
    by `tenant`.
    """

    def __init__(
        self, bus: Bus, inbox: str, request_id: str, *, packed: bool, start: int = 0
    ) -> None:
        self.inbox = inbox
        self.request_id = request_id
        self.tenant = ""
        self.index = 0  # of the next frame
        self.bytes = 0  # of the frames kept
        self.packed = packed
        self._bus = bus
        self._start = start
        self._kept: Kept | None = None
        self._ring: deque[bytes] = deque()

    def from_start(self) -> "Frames":
        """The same frames numbered from 0, of which those before ours are not sent."""
        return Frames(self._bus, self.inbox, self.request_id, packed=self.packed, start=self.index)

    def keep(self, kept: "Kept", tenant: str) -> None:
        """Let `tenant` ask for them again."""
        self._kept, self.tenant = kept, tenant
        kept.add(self)

    def put(self, event: Event, data: bytes) -> None:
        """Send one frame; `data` is JSON."""
        frame = b'{"request_id":%b,"index":%d,"event":"%b","data":%b}' % (
            msgspec.json.encode(self.request_id),
            self.index,
            event.encode(),
            data,
        )
        if self.packed:
            frame = msgspec.msgpack.encode(msgspec.json.decode(frame))
        if self._kept is not None:
            self._remember(frame, self._kept)
        if self.index >= self._start:
            self._bus.publish(self.inbox, frame)
        self.index += 1

    def end(self, error: MeshError | None = None) -> None:
        """Send the last frames."""
        if error is not None:
            self.put("error", error_body(error))
        self.put("done", b"null")

    def again(self, inbox: str, start: int) -> None:
        """Send those from `start` on once more, and all that follow, to `inbox`."""
        first = self.index - len(self._ring)
        if start < first:
            gone = Frames(self._bus, inbox, self.request_id, packed=self.packed)
            gone.index = start
            gone.end(Unavailable(f"Frame {start} is not kept any more, only {first} and later."))
            return
        self.inbox = inbox
        for frame in list(self._ring)[start - first :]:
            self._bus.publish(inbox, frame)

    def forget(self) -> int:
        """Drop the oldest frame kept; its bytes."""
        size = len(self._ring.popleft())
        self.bytes -= size
        return size

    def _remember(self, frame: bytes, kept: "Kept") -> None:
        self._ring.append(frame)
        self.bytes += len(frame)
        kept.bytes += len(frame)
        while len(self._ring) > 1 and (self.bytes > REQUEST_BYTES_MAX or kept.full()):
            kept.bytes -= self.forget()


class Kept:
    """The frames of all requests that this gateway answers on the bus, or did until lately."""

    def __init__(self) -> None:
        self.bytes = 0
        self._live: dict[str, Frames] = {}
        self._ended: OrderedDict[str, tuple[float, Frames]] = OrderedDict()

    def add(self, frames: Frames) -> None:
        """They are being sent."""
        self._live[frames.request_id] = frames

    def ended(self, frames: Frames) -> None:
        """The last was sent, of those that were added."""
        if self._live.get(frames.request_id) is frames:
            del self._live[frames.request_id]
            self._ended[frames.request_id] = (time.monotonic(), frames)
        self._expire()

    def find(self, request_id: str, tenant: str) -> Frames | None:
        """The frames of a request of `tenant`."""
        self._expire()
        frames = self._live.get(request_id)
        if frames is None and request_id in self._ended:
            frames = self._ended[request_id][1]
        return frames if frames is not None and frames.tenant == tenant else None

    def full(self) -> bool:
        """Is there too much, even without those that have ended?"""
        while self.bytes > KEPT_BYTES_MAX and self._ended:
            self._drop_first()
        return self.bytes > KEPT_BYTES_MAX

    def _expire(self) -> None:
        until = time.monotonic() - KEPT_S
        while self._ended and next(iter(self._ended.values()))[0] < until:
            self._drop_first()

    def _drop_first(self) -> None:
        _, (_, frames) = self._ended.popitem(last=False)
        self.bytes -= frames.bytes
