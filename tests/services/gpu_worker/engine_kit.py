"""A worker's core with a simulated model, a clock, and ears."""

import dataclasses
from typing import Any

import msgspec

from services.gpu_worker.config import SimConfig, WorkerConfig
from services.gpu_worker.engine_core import EngineCore
from services.gpu_worker.simulated import SimulatedRunner
from shared.ids import pack_ids, unpack_ids
from shared.messages import (
    Ended,
    Failed,
    Renew,
    Renewed,
    RenewedLeg,
    RenewLeg,
    RouteLost,
    Run,
    Started,
    StepDone,
    StepRecord,
    Submit,
)
from shared.sampling import SamplingParams
from shared.subjects import inbox

PROMPT = list(range(1, 41))
END_ID = 999
SIM = SimConfig(num_blocks=64, max_model_len=400, vocab_size=1000, output_tokens_max=0)


@dataclasses.dataclass
class Sent:
    """What the core put out, by kind."""

    started: list[Started]
    records: list[StepRecord]
    ended: list[tuple[str, int, str]]  # scheduler, epoch, reason
    failed: list[Failed]
    lost: list[RouteLost]
    renewed: list[RenewedLeg]
    detokenizers: set[str]

    @property
    def ids(self) -> list[int]:
        return [i for record in self.records for i in unpack_ids(record.ids)]


class Worker:
    """A core with a simulated model, its clock, and what it says."""

    def __init__(self, sim: SimConfig = SIM, runner: Any = None, **config: Any) -> None:
        self.runner = runner or SimulatedRunner(sim, words=range(900), end_ids=[END_ID])
        self.now = 100.0
        self.core = EngineCore("w-1", self.runner, WorkerConfig(**config), self.now)

    def run(self, epoch: int = 1, term: int = 1, choice: int = 0, **changes: Any) -> None:
        self.core.receive(run(epoch, term, choice, **changes), self.now)

    def steps(self, count: int = 1000) -> int:
        for done in range(count):
            if not self.core.step(self.now):
                return done
            self.now += 0.02
            self.core.tick(self.now)
            self.core.batcher.check_integrity()
        return count

    def take(self) -> Sent:
        sent = Sent([], [], [], [], [], [], set())
        for subject, message in self.core.outbox.take():
            match message:
                case Started():
                    assert subject == inbox("g-1")
                    sent.started.append(message)
                case StepDone():
                    sent.detokenizers.add(subject)
                    sent.records += message.records
                case Ended():
                    sent.ended += [(subject, leg.epoch, leg.reason) for leg in message.legs]
                case Failed():
                    sent.failed.append(message)
                case RouteLost():
                    sent.lost.append(message)
                case Renewed():
                    sent.renewed += message.legs
        return sent

    def renew(self, epoch: int = 1, choice: int = 0) -> RenewedLeg:
        question = RenewLeg("r", choice, epoch, 0)
        self.core.receive(Renew(gateway="g-1", legs=[question]), self.now)
        (answer,) = [e.message for e in self.core.outbox.take() if isinstance(e.message, Renewed)]
        return answer.legs[0]

    def assert_empty(self) -> None:
        self.core.batcher.check_integrity()
        assert self.core.free_blocks == self.core.spec.num_blocks
        assert self.core.load == self.core.waiting == self.core.prefill_tokens_waiting == 0


def run(epoch: int = 1, term: int = 1, choice: int = 0, **changes: Any) -> Run:
    submit = Submit(
        request_id="r",
        choice=choice,
        epoch=epoch,
        gateway="g-1",
        model="m",
        tenant="t",
        prompt_ids=pack_ids(PROMPT),
        sampling=SamplingParams(max_tokens=12, seed=7),
    )
    detokenizer = changes.pop("detokenizer", "d-1")
    scheduler = changes.pop("scheduler", "s-1")
    if "output_ids" in changes:
        changes["output_ids"] = pack_ids(changes["output_ids"])
    submit = msgspec.structs.replace(submit, **changes)
    return Run(submit=submit, scheduler=scheduler, term=term, detokenizer=detokenizer)


def truth(**changes: Any) -> list[int]:
    """The ids of the leg on a worker where nothing goes wrong."""
    worker = Worker()
    worker.run(**changes)
    worker.steps()
    return worker.take().ids
