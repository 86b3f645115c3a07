"""Two workers, one L2 that misbehaves: whatever it does, every leg makes the ids it makes alone."""

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.gpu_worker.config import SimConfig
from shared.ids import pack_ids, unpack_ids
from shared.messages import BlocksFound, BlocksStored, Cancel, Ended, Failed, StepDone
from shared.sampling import SamplingParams
from shared.subjects import inbox
from tests.services.gpu_worker.engine_kit import run
from tests.services.gpu_worker.l2.tier_kit import L2Worker, Question, Tier

SMALL = SimConfig(num_blocks=14, max_model_len=200, vocab_size=1000, output_tokens_max=0)
SAMPLING = SamplingParams(max_tokens=40, seed=5)
PROMPTS = [
    [*range(1, shared), *range(300, 300 + own)]
    for shared, own in [(70, 3), (70, 30), (40, 1), (17, 60)]
]


def truth(prompt: list[int]) -> list[int]:
    worker = L2Worker(None)
    worker.run(prompt_ids=pack_ids(prompt), sampling=SAMPLING)
    worker.steps()
    return worker.take().ids


TRUTH = [truth(prompt) for prompt in PROMPTS]


class L2Machine(RuleBasedStateMachine):
    """Answers come late, twice, wrong or never, slots are kept, blocks go missing."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = Tier()
        self.workers = [
            L2Worker(None, SMALL, max_legs=3, max_batched_tokens=24, l2_slots_bytes=10 * 128)
            for _ in range(2)
        ]
        self.asked: list[tuple[int, Question]] = []
        self.answered: list[tuple[int, BlocksFound | BlocksStored]] = []
        self.legs = 0
        self.made: dict[tuple[int, int], list[int]] = {}  # worker, leg
        self.prompt_of: dict[int, int] = {}

    @rule(worker=st.integers(0, 1), prompt=st.integers(0, 3), start=st.integers(0, 30))
    def begin(self, worker: int, prompt: int, start: int) -> None:
        leg = self.legs = self.legs + 1
        self.prompt_of[leg] = prompt
        self.made[worker, leg] = TRUTH[prompt][:start]
        ids = pack_ids(PROMPTS[prompt])
        message = run(
            choice=leg, prompt_ids=ids, sampling=SAMPLING, output_ids=TRUTH[prompt][:start]
        )
        message = msgspec.structs.replace(
            message, submit=msgspec.structs.replace(message.submit, priority=leg % 2)
        )
        self.workers[worker].core.receive(message, self.workers[worker].now)

    @rule(worker=st.integers(0, 1), count=st.integers(1, 15))
    def step(self, worker: int, count: int) -> None:
        at_work = self.workers[worker]
        for _ in range(count):
            at_work.tick(0.01)
            at_work.core.step(at_work.now)
            self.look(worker)

    @rule(worker=st.integers(0, 1), seconds=st.sampled_from([0.05, 0.3, 1.2, 3.0]))
    def wait(self, worker: int, seconds: float) -> None:
        self.workers[worker].tick(seconds)
        self.look(worker)

    @rule(worker=st.integers(0, 1), ready=st.booleans())
    def beat(self, worker: int, ready: bool) -> None:
        self.workers[worker].hear(self.tier, ready=ready)

    @rule(worker=st.integers(0, 1), rounds=st.integers(1, 20))
    def serve(self, worker: int, rounds: int) -> None:
        """All goes well for a while."""
        at_work = self.workers[worker]
        for _ in range(rounds):
            at_work.hear(self.tier)
            at_work.tick(0.06)
            at_work.exchange(self.tier)
            at_work.tick()
            at_work.core.step(at_work.now)
            self.look(worker)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        """Any question, in any order."""
        if self.asked:
            index = data.draw(st.integers(0, len(self.asked) - 1))
            worker, question = self.asked.pop(index)
            self.answered += [(worker, answer) for answer in self.tier.answer(question)]

    @rule(data=st.data(), again=st.booleans(), off=st.sampled_from([0, 0, 0, 1, -1, 7]))
    def deliver(self, data: st.DataObject, again: bool, off: int) -> None:
        if not self.answered:
            return
        index = data.draw(st.integers(0, len(self.answered) - 1))
        worker, answer = self.answered[index]
        if not again:
            del self.answered[index]
        if off and isinstance(answer, BlocksFound) and answer.num_loaded + off > answer.num_blocks:
            answer = msgspec.structs.replace(answer, num_loaded=answer.num_loaded + off)
        self.workers[worker].core.receive(answer, self.workers[worker].now)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.asked:
            del self.asked[data.draw(st.integers(0, len(self.asked) - 1))]

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        if self.tier.blocks:
            del self.tier.blocks[data.draw(st.sampled_from(sorted(self.tier.blocks)))]

    @rule(worker=st.integers(0, 1), data=st.data())
    def cancel(self, worker: int, data: st.DataObject) -> None:
        if self.legs:
            leg = data.draw(st.integers(1, self.legs))
            at_work = self.workers[worker]
            at_work.core.receive(Cancel(request_id="r", choice=leg, epoch=1), at_work.now)
            self.look(worker)

    def look(self, worker: int) -> None:
        for subject, message in self.workers[worker].core.outbox.take():
            if subject == inbox(self.tier.instance):
                self.asked.append((worker, message))
            assert not isinstance(message, Failed)
            for record in message.records if isinstance(message, StepDone) else []:
                made = self.made[worker, record.choice]
                assert record.index == len(made)
                made += unpack_ids(record.ids)
                assert made == TRUTH[self.prompt_of[record.choice]][: len(made)]
            for leg in message.legs if isinstance(message, Ended) else []:
                ends = self.made[worker, leg.choice] == TRUTH[self.prompt_of[leg.choice]]
                assert ends or leg.reason == "cancelled"

    @invariant()
    def is_whole(self) -> None:
        for worker in self.workers:
            worker.core.batcher.check_integrity()

    def teardown(self) -> None:
        """Left alone with a faultless tier all legs end, and no slot stays away."""
        for index, worker in enumerate(self.workers):
            self.look(index)
            for _ in range(500):
                worker.hear(self.tier)
                worker.tick(0.1)
                worker.exchange(self.tier)
                worker.core.step(worker.now)
                self.look(index)
            worker.assert_empty()
            link = worker.core._l2._link
            assert link.lending.num_free == link.lending.num_slots
            link.close()
        for memory in self.tier._maps.values():
            memory.close()


L2Machine.TestCase.settings = settings(max_examples=25, stateful_step_count=40, deadline=None)
TestL2 = L2Machine.TestCase
