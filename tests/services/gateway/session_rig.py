"""A session table alone in the world of a test."""

import random
from typing import Any

from services.gateway.events import Delta, Resume, SessionEnd, SessionEvent, SessionSpec
from services.gateway.sessions import Limits, SessionTable
from shared.ids import pack_ids
from shared.messages import (
    Beacon,
    Beat,
    Message,
    Started,
    Submit,
    TextDelta,
    TextRecord,
    ToGateway,
    Tokenized,
    TokenizedPrompt,
)
from shared.sampling import SamplingParams

R = "r" * 32


class Rig:
    """A session table whose whole world is this test: time moves in ticks, answers are given."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.now = 100.0
        self.table = SessionTable("g", "p", random.Random(0), limits)
        self.events: list[SessionEvent] = []
        self.say(self.beacon("s", 1))
        self.say(Beat(instance="t0", role="tokenizer", seq=1))
        self.say(Beat(instance="t1", role="tokenizer", seq=1))

    def beacon(self, scheduler: str, term: int) -> Beacon:
        return Beacon(scheduler=scheduler, term=term, pool="p", workers=1, max_model_len=100)

    def say(self, message: ToGateway) -> None:
        self.table.receive(message, self.now)

    def sent(self, kind: type[Message] | None = None) -> list[Any]:
        """What has been sent since last asked, as (inbox, message)."""
        taken = [(e.subject.rsplit(".", 1)[1], e.message) for e in self.table.outbox.take()]
        return [pair for pair in taken if kind is None or isinstance(pair[1], kind)]

    def pass_time(self, seconds: float, beating: tuple[str, ...] = ("t0", "t1")) -> None:
        """Tick through it, with these tokenizers alive."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + 0.05, until)
            for tokenizer in beating:
                self.say(Beat(instance=tokenizer, role="tokenizer", seq=1))
            self.table.tick(self.now)

    def open(self, resume: Resume | None = None, **fields: Any) -> None:
        defaults: dict[str, Any] = {
            "request_id": R,
            "model": "m",
            "ids": [[7, 8]],
            "max_tokens": 10,
            "seed": 5,
            "sampling": SamplingParams(max_tokens=0),
        }
        self.table.open(SessionSpec(**defaults | fields), self.events.append, self.now, resume)

    def tokenize(self, prompts: list[list[int]] | None = None) -> None:
        entries = [TokenizedPrompt(pack_ids(ids)) for ids in prompts or [[7, 8]]]
        self.say(Tokenized(request_id=R, attempt=1, tokenizer="t0", prompts=entries))

    def start(self, epoch: int = 1, worker: str = "w0", choice: int = 0) -> None:
        self.say(Started(request_id=R, choice=choice, epoch=epoch, worker=worker, detokenizer="d0"))

    def text(self, epoch: int, index: int, ids: list[int], finish: str = "") -> None:
        record = TextRecord(R, 0, epoch, index, pack_ids(ids), "x" * len(ids), finish)
        self.say(TextDelta(detokenizer="d0", records=[record]))

    def running(self) -> None:
        """One leg that runs on w0 and has delivered ids 1 and 2."""
        self.open()
        self.tokenize()
        self.start()
        self.text(1, 0, [1, 2])
        self.sent()

    def resubmitted(self) -> Submit:
        """The next Submit, which must come soon."""
        for _ in range(25):
            self.pass_time(0.05)
            if submits := self.sent(Submit):
                assert len(submits) == 1, submits
                submit: Submit = submits[0][1]
                return submit
        raise AssertionError("no Submit")

    def ids(self) -> list[int]:
        return [i for e in self.events if isinstance(e, Delta) for i in e.ids]

    def end(self) -> SessionEnd:
        assert isinstance(self.events[-1], SessionEnd)
        return self.events[-1]

    def error_code(self) -> str:
        error = self.end().error
        return error.code if error else ""
