"""The smallest actor and core, and messages to feed them."""

from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import msgspec

from shared.actor import Actor
from shared.clock import Clock, monotonic
from shared.config import Launch
from shared.core import Outbox
from shared.ids import pack_ids
from shared.messages import (
    Cancel,
    Detokenize,
    Detokenized,
    Generate,
    Message,
    Run,
    StepDone,
    Submit,
)
from shared.sampling import SamplingParams
from shared.subjects import inbox
from shared.testing import MemoryBus


class Recorder:
    """A core that remembers; answers `Detokenize`, raises at the text `raise`."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.counters: Counter[str] = Counter()
        self.log: list[Any] = []

    def receive(self, message: Any, now: float) -> None:  # noqa: ARG002
        if isinstance(message, StepDone) and message.step < 0:
            raise ValueError("the core")
        self.log.append(message)
        self.counters["received"] += 1
        if isinstance(message, Detokenize):
            if message.ids == b"raise":
                raise ValueError("the core")
            answer = Detokenized(
                request_id=message.request_id,
                attempt=message.attempt,
                tokenizer="t",
                text="x" * len(message.ids),
            )
            self.outbox.put(inbox(message.gateway), answer)

    def tick(self, now: float) -> None:  # noqa: ARG002
        if self.log[-1:] != ["tick"]:
            self.log.append("tick")

    def slept(self, now: float) -> None:  # noqa: ARG002
        self.log.append("slept")

    def connection_lost(self, now: float) -> None:  # noqa: ARG002
        self.log.append("lost")

    def reconnected(self, now: float) -> None:  # noqa: ARG002
        self.log.append("back")

    @property
    def messages(self) -> list[Any]:
        return [entry for entry in self.log if isinstance(entry, Message)]


class Echo(Actor):
    role: ClassVar[str] = "tokenizer"
    mailbox: ClassVar[Any] = Generate | Detokenize | Cancel | Submit | Run | StepDone
    tick_s: ClassVar[float] = 0.01
    survives_errors: ClassVar[bool] = True


class Fragile(Echo):
    survives_errors: ClassVar[bool] = False


def launch(tmp_path: Path, status_fd: int | None = None) -> Launch:
    return Launch(
        role="tokenizer",
        name="tokenizer-0",
        instance="tokenizer-0-abc",
        nats_url="",
        nats_user="",
        nats_password="",
        run_dir=str(tmp_path),
        status_fd=status_fd,
    )


ME = "tokenizer-0-abc"


def make(
    bus: MemoryBus, tmp_path: Path, kind: type[Actor] = Echo, clock: Clock = monotonic
) -> tuple[Actor, Recorder]:
    core = Recorder()
    return kind(launch(tmp_path), bus, core, clock), core


async def hearing(bus: MemoryBus, subject: str, kind: Any) -> list[Any]:
    """What of type `kind` is published on `subject` from now on."""
    heard: list[Any] = []
    decoder = msgspec.msgpack.Decoder(kind)
    await bus.subscribe(subject, lambda delivery: heard.append(decoder.decode(delivery.payload)))
    return heard


def detokenize(number: int, ids: bytes = b"abcd") -> Detokenize:
    return Detokenize(request_id=f"{number:032x}", attempt=1, gateway="g", ids=ids)


def cancel(number: int) -> Cancel:
    return Cancel(request_id=f"{number:032x}", choice=0, epoch=1)


def submit(deadline_ms: int = 0) -> Submit:
    return Submit(
        request_id="s" * 32,
        choice=2,
        epoch=3,
        gateway="g",
        model="m",
        tenant="t",
        prompt_ids=pack_ids([1]),
        sampling=SamplingParams(max_tokens=1),
        deadline_ms=deadline_ms,
    )
