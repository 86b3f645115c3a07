"""The log of one stored request, read: who runs it, what it said, how it ended. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from services.gateway.stored.events import (
    Adopted,
    CancelRequested,
    Ended,
    Event,
    Opened,
    Output,
    Submitted,
    decode_event,
)
from shared.errors import MeshError
from shared.ids import count_ids, unpack_ids

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]


@dataclass(slots=True)
class Choice:
    """One choice so far; it has ended when it has a reason to."""

    ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


class Log:
    """Everything that the events added so far say. Raises `MeshError` for events that no gateway
    may have appended: nothing may be built on such a log.
    """

    def __init__(self) -> None:
        self.last = 0  # sequence of the last event; what an append has to expect
        self.events = 0
        self.submitted: Submitted | None = None
        self.adopted = 0  # sequence of the last `Adopted`,
        self.adopter = ""  # and whose it was
        self.fruitless = 0  # adoptions in a row that brought no output
        self.opened: Opened | None = None
        self.choices: defaultdict[int, Choice] = defaultdict(Choice)
        self.cancel_requested = False
        self.ended: Ended | None = None

    def add(self, seq: int, event: Event) -> None:
        """Take the next event."""
        if seq <= self.last or self.ended is not None:
            raise MeshError(f"Event {seq} follows {self.last}, or the end.")
        if (self.submitted is None) != isinstance(event, Submitted):
            raise MeshError(f"Event {seq} is {type(event).__name__}: a log is submitted once.")
        self.last = seq
        self.events += 1
        match event:
            case Submitted():
                self.submitted = event
            case Adopted():
                self.adopted, self.adopter = seq, event.gateway
                self.fruitless += 1
            case Opened():
                self.opened = event
            case Output():
                self._output(event)
            case CancelRequested():
                self.cancel_requested = True
            case Ended():
                self.ended = event

    @property
    def status(self) -> Status:
        """As clients call it."""
        if self.ended is not None:
            if not self.ended.code:
                return "completed"
            return "cancelled" if self.ended.code == "cancelled" else "failed"
        return "in_progress" if self.adopted else "queued"

    @property
    def deadline(self) -> float:
        """When it has to have ended, in seconds since 1970."""
        assert self.submitted is not None
        return self.submitted.created + self.submitted.timeout_s

    def end(self, error: MeshError | None, cached_tokens: int = 0) -> Ended:
        """The last event, with what was used according to the events before it."""
        prompts = self.opened.tokenized.prompts if self.opened is not None else []
        return Ended(
            code=error.code if error is not None else "",
            detail=error.detail if error is not None else "",
            param=error.param if error is not None else None,
            prompt_tokens=sum(count_ids(prompt.prompt_ids) for prompt in prompts),
            completion_tokens=sum(len(choice.ids) for choice in self.choices.values()),
            cached_tokens=cached_tokens,
        )

    def _output(self, event: Output) -> None:
        for piece in event.pieces:
            choice = self.choices[piece.choice]
            if piece.index != len(choice.ids) or choice.finish_reason:
                raise MeshError(f"Choice {piece.choice} goes on at {piece.index}: gap or repeat.")
            choice.ids += unpack_ids(piece.ids)
            choice.finish_reason = piece.finish_reason
        self.fruitless = 0


def read_log(entries: Iterable[tuple[int, bytes]]) -> Log:
    """The log that `entries` (sequence, event) are; an empty one when its beginning is not kept
    any more.
    """
    log = Log()
    events = [(seq, decode_event(payload)) for seq, payload in entries]
    if events and isinstance(events[0][1], Submitted):
        for seq, event in events:
            log.add(seq, event)
    return log
