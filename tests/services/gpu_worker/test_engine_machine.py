"""Any order of runs, re-drives, cancels, renewals, sleeps and steps: each epoch's ids are right."""

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.gpu_worker.config import SimConfig, WorkerConfig
from services.gpu_worker.engine_core import EngineCore
from services.gpu_worker.simulated import SimulatedRunner
from shared.ids import pack_ids, unpack_ids
from shared.messages import Cancel, Ended, Failed, Renew, Renewed, RenewLeg, Run, StepDone
from shared.sampling import SamplingParams
from tests.services.gpu_worker import engine_kit

SIM = SimConfig(
    num_blocks=9, max_model_len=120, vocab_size=500, output_tokens_min=3, output_tokens_max=40
)
CHOICES = range(4)
PROMPTS = {choice: list(range(1, 20 + 7 * choice)) for choice in CHOICES}


def new_core(now: float, **sim: Any) -> EngineCore:
    config = msgspec.structs.replace(SIM, **sim)
    runner = SimulatedRunner(config, words=range(400), end_ids=[499])
    return EngineCore("w-1", runner, WorkerConfig(max_legs=3, max_batched_tokens=24), now)


def run(choice: int, epoch: int, output_ids: list[int], **changes: Any) -> Run:
    return engine_kit.run(
        epoch,
        choice=choice,
        prompt_ids=pack_ids(PROMPTS[choice]),
        sampling=SamplingParams(max_tokens=35, seed=choice, logprobs=1 if choice == 2 else None),
        output_ids=output_ids,
        **changes,
    )


def truth(choice: int) -> list[int]:
    core = new_core(0.0, num_blocks=200)
    core.receive(run(choice, 1, []), 0.0)
    while core.step(0.0):
        pass
    return [
        i
        for e in core.outbox.take()
        if isinstance(e.message, StepDone)
        for r in e.message.records
        for i in unpack_ids(r.ids)
    ]


TRUTH = {choice: truth(choice) for choice in CHOICES}


class CoreMachine(RuleBasedStateMachine):
    """A core under a caller that knows only what a session knows: epochs and delivered ids."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 50.0
        self.core = new_core(self.now)
        self.epoch = dict.fromkeys(CHOICES, 0)
        self.index: dict[tuple[int, int], int] = {}  # (choice, epoch) -> next index expected
        self.delivered = dict.fromkeys(CHOICES, 0)
        self.over: set[tuple[int, int]] = set()  # epochs that nothing may be said of any more

    @rule(choice=st.sampled_from(CHOICES), data=st.data(), alone=st.booleans())
    def drive(self, choice: int, data: st.DataObject, alone: bool) -> None:
        """A run from anywhere in what was delivered (a session may know less than was sent)."""
        self.epoch[choice] += data.draw(st.integers(1, 2))
        epoch = self.epoch[choice]
        start = data.draw(st.integers(0, min(self.delivered[choice], len(TRUTH[choice]) - 1)))
        self.index[choice, epoch] = start
        message = run(choice, epoch, TRUTH[choice][:start], priority=choice % 2, alone=alone)
        for _ in range(data.draw(st.integers(1, 2))):
            self.core.receive(message, self.now)
        self.look()

    @rule(choice=st.sampled_from(CHOICES), back=st.integers(0, 2))
    def cancel(self, choice: int, back: int) -> None:
        epoch = max(0, self.epoch[choice] - back)
        self.core.receive(Cancel(request_id="r", choice=choice, epoch=epoch), self.now)
        self.look()
        self.over |= {(choice, e) for e in range(epoch + 1)}
        self.core.receive(run(choice, epoch, []), self.now)  # late: must find a tombstone
        self.look()

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.core.step(self.now)
            self.now += 0.02
            self.core.tick(self.now)
        self.look()

    @rule(seconds=st.sampled_from([0.1, 2.5, 6.0, 11.0]))
    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.core.tick(self.now)
        self.look()

    @rule()
    def renew(self) -> None:
        questions = [RenewLeg("r", choice, self.epoch[choice], 0) for choice in CHOICES]
        self.core.receive(Renew(gateway="g-1", legs=questions), self.now)
        (answer,) = [e.message for e in self.core.outbox.take() if isinstance(e.message, Renewed)]
        for leg in answer.legs:
            if leg.state in {"prefill", "decode", "paused", "done"}:
                assert leg.sent == self.index[leg.choice, leg.epoch]
            if leg.state == "done":
                assert leg.sent == len(TRUTH[leg.choice])

    def look(self) -> None:
        """Every record goes on where its epoch stands, with the true ids; ends are true ends."""
        for _, message in self.core.outbox.take():
            assert not isinstance(message, Failed)
            if isinstance(message, Ended):
                self.over |= {(leg.choice, leg.epoch) for leg in message.legs}
            if not isinstance(message, StepDone):
                continue
            for record in message.records:
                key = (record.choice, record.epoch)
                ids = unpack_ids(record.ids)
                true_ids = TRUTH[record.choice]
                end = record.index + len(ids)
                assert key not in self.over
                assert record.index == self.index[key]
                assert ids == true_ids[record.index : end]
                assert bool(record.end) == (end == len(true_ids))
                assert record.epoch == self.epoch[record.choice]
                if record.choice == 2:
                    assert len(record.logprobs or []) == len(ids)
                self.index[key] = end
                self.delivered[record.choice] = max(self.delivered[record.choice], end)

    @invariant()
    def is_whole(self) -> None:
        self.core.batcher.check_integrity()

    def teardown(self) -> None:
        """Left alone, all legs end, and nothing stays behind."""
        while self.core.step(self.now):
            self.core.tick(self.now)
        self.look()
        self.core.batcher.check_integrity()
        assert self.core.free_blocks == SIM.num_blocks
        assert self.core.load == self.core.waiting == 0


CoreMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestCore = CoreMachine.TestCase
