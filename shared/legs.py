"""What a message says about its legs: whom to tell of a failure, how long it may wait. Pure."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from shared.messages import Detokenize, Generate, Run, StepDone, Submit


class Named(NamedTuple):
    """Whom to tell that a message could not be handled."""

    gateway: str
    request_id: str
    choice: int
    epoch: int


def named_by(message: Any) -> Iterator[Named]:
    """The legs that `message` is about, where it also names their gateway."""
    match message:
        case Generate() | Detokenize():
            yield Named(message.gateway, message.request_id, -1, message.attempt)
        case Submit():
            yield Named(message.gateway, message.request_id, message.choice, message.epoch)
        case Run():
            yield from named_by(message.submit)
        case StepDone():
            for record in message.records:
                yield Named(record.gateway, record.request_id, record.choice, record.epoch)


def deadline_s(message: Any) -> float | None:
    """What remained for `message` when it was sent; None = it carries no deadline."""
    carrier = message.submit if isinstance(message, Run) else message
    deadline_ms: int = getattr(carrier, "deadline_ms", 0)
    return deadline_ms / 1000 if deadline_ms > 0 else None
