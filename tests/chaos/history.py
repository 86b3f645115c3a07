"""What happened, as an append-only file of JSON lines: written by who acts, read by the checker.

Times are seconds of one monotonic clock. Nothing is ever judged here.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec
from msgspec import Struct


class Event(Struct, frozen=True, kw_only=True, tag=True, omit_defaults=True):
    """Root of all lines."""

    at: float = 0.0  # 0 = filled in by `History.add`


class Asked(Event, frozen=True, kw_only=True):
    """A request is on its way. Requests of one `ask` have one answer."""

    request: str
    ask: str
    way: str  # stream, whole, bus, …
    key: str = ""  # of a stored request: those of one key are one request, with one answer
    may_fail: tuple[str, ...] = ()  # codes of errors that are the right answer to this request


class Told(Event, frozen=True, kw_only=True):
    """One delivery of one choice."""

    request: str
    choice: int
    text: str = ""
    tokens: int | None = None  # how many, where the answer says so (logprobs)
    logprobs: tuple[float, ...] = ()
    finish: str = ""


class Used(Event, frozen=True, kw_only=True):
    """The usage that the answer ended with."""

    request: str
    prompt_tokens: int
    completion_tokens: int


class Named(Event, frozen=True, kw_only=True):
    """What the mesh calls a stored request."""

    request: str
    name: str


class Numbered(Event, frozen=True, kw_only=True):
    """One event of a stored answer, with the number that the mesh gave it; `last` = its end."""

    request: str
    number: int
    last: bool = False


How = Literal["finished", "failed", "cancelled", "cut", "silent"]
"""failed: an error of OpenAI's shape came. cancelled: by the client. cut: the connection ended
without an end of the answer. silent: nothing came within the client's patience."""


class Ended(Event, frozen=True, kw_only=True):
    """The client is done with the request; `code` is the error's, "" for one without a shape."""

    request: str
    how: How
    code: str = ""
    detail: str = ""


class Injected(Event, frozen=True, kw_only=True):
    """The fault is there, and `proof` says how that is known."""

    fault: str
    target: str
    proof: str


class Healed(Event, frozen=True, kw_only=True):
    """What the nemesis did is undone; the mesh may still be on its way back."""

    fault: str


class AtRest(Event, frozen=True, kw_only=True):
    """All requests have ended and the mesh had its time: what is still held."""

    leaks: tuple[str, ...] = ()


Line = Asked | Told | Used | Named | Numbered | Ended | Injected | Healed | AtRest


class History:
    """Appends to `path`; also kept in memory, because a round's checker reads it at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[Line] = []
        self._file = path.open("ab", buffering=1 << 16)
        self._encoder = msgspec.json.Encoder()

    def add(self, line: Line) -> None:
        """Append `line`, as of now unless it says when."""
        stamped = line if line.at else msgspec.structs.replace(line, at=time.monotonic())
        self.lines.append(stamped)
        self._file.write(self._encoder.encode(stamped) + b"\n")

    def __enter__(self) -> "History":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()


def read(path: Path) -> list[Line]:
    """The lines of a history."""
    decoder = msgspec.json.Decoder(Line)
    with path.open("rb") as file:
        return [decoder.decode(line) for line in file]


def requests(lines: Iterable[Line]) -> int:
    """How many requests began."""
    return sum(isinstance(line, Asked) for line in lines)
