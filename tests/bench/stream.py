"""One streamed request at the price of a load generator that shares the servers' processors.

A token costs a timestamp and a search for the end of an event; JSON is read once per request, in
its last event. The official client spends 50 times as much.
"""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

TIMEOUT_S = 900.0
SHOWN_BYTES = 300  # of an answer that is an error


class AskFailed(Exception):
    """A server refused, broke off or said nothing; the text says which."""


class Answer(NamedTuple):
    """One answered request. Definitions are those of `vllm bench serve`."""

    sent_s: float
    times: Sequence[float]  # arrival of each event with `choices`
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int

    @property
    def ttft_s(self) -> float:
        """Sent to first event."""
        return self.times[0] - self.sent_s

    @property
    def e2el_s(self) -> float:
        """Sent to last event."""
        return self.times[-1] - self.sent_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first; of one token there is none."""
        return (self.times[-1] - self.times[0]) / max(1, self.output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Between two events; a server that sends two tokens in one event has fewer."""
        return [later - sooner for sooner, later in itertools.pairwise(self.times)]


class EventReader:
    """Reads one HTTP/1.1 answer as it arrives, cut anywhere."""

    def __init__(self) -> None:
        self.status = 0
        self.times: list[float] = []  # arrival of each event that is not [DONE]
        self.ended = False  # the last chunk is here; without chunks, the connection's end says so
        self._last = b""  # the last of those events
        self._raw = b""  # not yet read: of the head, or of a chunk
        self._text = b""  # of the body, not yet an event
        self._chunked = False
        self._left = 0  # bytes of the chunk to come, with its CRLF

    def feed(self, data: bytes, now: float) -> None:
        """Take what arrived at `now`."""
        self._raw += data
        if not self.status and not self._read_head():
            return
        if self._chunked:
            self._read_chunks()
        else:
            self._text += self._raw
            self._raw = b""
        if self.status == 200:
            self._read_events(now)

    def _read_head(self) -> bool:
        head, end, rest = self._raw.partition(b"\r\n\r\n")
        if not end:
            return False
        self._raw = rest
        lines = head.lower().split(b"\r\n")
        self._chunked = b"transfer-encoding: chunked" in lines
        self.status = int(lines[0].split()[1])
        return True

    def _read_chunks(self) -> None:
        raw, at = self._raw, 0
        while at < len(raw) and not self.ended:
            if not self._left:
                end = raw.find(b"\r\n", at)
                if end < 0:
                    break
                size = int(raw[at:end].partition(b";")[0], 16)
                self.ended = size == 0
                self._left = size + 2
                at = end + 2
            taken = min(self._left, len(raw) - at)
            content = min(taken, max(0, self._left - 2))  # the last two bytes are the chunk's CRLF
            self._text += raw[at : at + content]
            self._left -= taken
            at += taken
        self._raw = raw[at:]

    def _read_events(self, now: float) -> None:
        if b"\r" in self._text:
            self._text = self._text.replace(b"\r\n", b"\n")
        *events, self._text = self._text.split(b"\n\n")
        for event in events:
            if (event.startswith(b"data:") or b"\ndata:" in event) and event[-6:] != b"[DONE]":
                self.times.append(now)
                self._last = event

    def answer(self, sent_s: float) -> Answer:
        """What the whole answer was; raises `AskFailed`."""
        if self.status != 200:
            raise AskFailed(f"HTTP {self.status or 'nothing'}: {_shown(self._text)}")
        _, _, payload = (b"\n" + self._last).rpartition(b"\ndata:")
        last: dict[str, Any] = json.loads(payload or b"{}")
        usage = last.get("usage")
        if not usage:
            raise AskFailed(f"the stream ended without usage: {_shown(self._last or self._text)}")
        times = self.times if last.get("choices") else self.times[:-1]
        if not times:
            raise AskFailed("the stream had no event with choices")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            sent_s,
            times,
            usage["prompt_tokens"],
            usage["completion_tokens"],
            details.get("cached_tokens") or 0,
        )


def _shown(text: bytes) -> str:
    return text[:SHOWN_BYTES].decode(errors="replace").strip()


class _Connection(asyncio.Protocol):
    """Writes `request`, feeds `reader`, and is `over` when the answer or the connection ends."""

    def __init__(self, request: bytes, reader: EventReader) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._reader = reader
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._reader.feed(data, time.perf_counter())
        if self._reader.ended and self._transport is not None:
            self._transport.close()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.over.done():
            self.over.set_result(None)  # what is missing, the reader says


async def ask(url: str, body: dict[str, Any], reader: EventReader | None = None) -> Answer:
    """POST `body`, read the stream; a `reader` of the caller's can be watched meanwhile.

    Raises `AskFailed`. A request has a connection of its own, and its time begins before that.
    """
    reader = reader or EventReader()
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    content = json.dumps(body).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    sent_s = time.perf_counter()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            transport, connection = await asyncio.get_running_loop().create_connection(
                lambda: _Connection(head.encode() + content, reader), host, port
            )
            try:
                await connection.over
            finally:
                transport.close()
    except (OSError, TimeoutError) as error:
        raise AskFailed(f"{url}: {error or 'no end within ' + str(TIMEOUT_S) + ' s'}") from error
    return reader.answer(sent_s)
