"""The shape of a pure core: messages and time in, envelopes out. No asyncio, no bus, no clock."""

from collections import Counter
from typing import NamedTuple, Protocol, TypeVar

from shared.messages import Message

In_contra = TypeVar("In_contra", contravariant=True)


class Envelope(NamedTuple):
    """A message and the subject it goes to."""

    subject: str
    message: Message


class Outbox:
    """What a core wants sent, in order. The actor around it takes and publishes it."""

    def __init__(self) -> None:
        self._envelopes: list[Envelope] = []

    def put(self, subject: str, message: Message) -> None:
        self._envelopes.append(Envelope(subject, message))

    def take(self) -> list[Envelope]:
        """Everything put since the last take."""
        taken, self._envelopes = self._envelopes, []
        return taken


class Core(Protocol[In_contra]):
    """What `shared.actor` drives: one mailbox union in, one outbox out."""

    outbox: Outbox
    counters: Counter[str]
    """How often what happened; `$SRV.STATS` shows it."""

    def receive(self, message: In_contra, now: float) -> None:
        """Take one message. Never raises for what a peer can send."""

    def tick(self, now: float) -> None:
        """Judge what time has made true."""
