"""What a worker says of the prompt's own ids: all of them, once each, and never from a cache."""

from collections import Counter

import msgspec
import pytest

from services.gpu_worker.config import SimConfig
from services.gpu_worker.runner import Outcome, Scheduled
from services.gpu_worker.simulated import SimulatedRunner
from shared.ids import pack_ids, unpack_ids
from shared.messages import PromptLogprobs
from shared.sampling import SamplingParams
from shared.subjects import inbox
from tests.services.gpu_worker.engine_kit import END_ID, PROMPT, SIM, Worker, truth

ASKED = SamplingParams(max_tokens=12, seed=7, prompt_logprobs=2)
PLAIN = msgspec.structs.replace(ASKED, prompt_logprobs=None)


class Watched(SimulatedRunner):
    """Counts what it scored and what it computed."""

    def __init__(self, sim: SimConfig = SIM) -> None:
        super().__init__(sim, words=range(900), end_ids=[END_ID])
        self.scored: Counter[int] = Counter()  # choices are told apart by their prompts' first id
        self.computed = 0

    def execute(self, batch: list[Scheduled]) -> list[Outcome]:
        outcomes = super().execute(batch)
        for row, outcome in zip(batch, outcomes, strict=True):
            self.scored[row.sequence.prompt_ids[0]] += len(outcome.scores)
            self.computed += row.num_tokens
        return outcomes


def expected() -> PromptLogprobs:
    worker = Worker()
    worker.run(sampling=ASKED)
    worker.steps()
    found = worker.take().records[0].prompt_logprobs
    assert found is not None
    return found


def test_they_ride_with_the_first_id_alone() -> None:
    """One entry per prompt id but the first, best ids included; the answer is the same with them.
    Of a leg that did not ask there are none.
    """
    worker = Worker()
    worker.run(sampling=ASKED)
    worker.run(choice=1, sampling=PLAIN)
    worker.steps()
    sent = worker.take()
    first, *others = [r.prompt_logprobs for r in sent.records if r.choice == 0]

    assert first is not None
    assert unpack_ids(first.ids) == PROMPT
    assert len(first.logprobs) == len(first.ranks) == len(PROMPT) - 1
    assert {len(unpack_ids(entry.top_ids)) for entry in first.logprobs} == {2}
    assert not any(others)
    assert not any(r.prompt_logprobs for r in sent.records if r.choice == 1)
    assert [i for r in sent.records if r.choice == 0 for i in unpack_ids(r.ids)] == truth()


def test_a_prompt_of_one_id_has_none() -> None:
    worker = Worker()
    worker.run(sampling=ASKED, prompt_ids=pack_ids([5]))
    worker.steps()
    assert worker.take().records[0].prompt_logprobs == PromptLogprobs(pack_ids([5]), [], [])


@pytest.mark.parametrize("budget", [1, 7, 16, 39, 40])
def test_chunks_do_not_matter(budget: int) -> None:
    worker = Worker(max_legs=1, max_batched_tokens=budget)
    worker.run(sampling=ASKED)
    worker.steps()
    assert worker.take().records[0].prompt_logprobs == expected()


def test_a_cached_prefix_is_computed_again() -> None:
    """The logits of a cached prefix are nowhere; its blocks serve others all the same."""
    worker = Worker(runner=Watched())
    worker.run(sampling=PLAIN)
    worker.steps()
    worker.take()
    computed = worker.runner.computed
    worker.run(choice=1, sampling=ASKED)
    worker.run(choice=2, sampling=PLAIN)
    worker.steps()
    sent = worker.take()
    cached = {started.choice: started.num_cached_tokens for started in sent.started}

    assert cached == {1: 0, 2: 32}
    assert sent.records[0].prompt_logprobs == expected()
    assert worker.runner.computed == computed + len(PROMPT) + (len(PROMPT) - 32) + 2 * 11


def test_it_waits_for_nobody_who_computes_the_same_prompt() -> None:
    """Two legs of one prompt in one step: the other's blocks would be of no use to it."""
    worker = Worker()
    for choice in range(2):
        worker.run(choice=choice, sampling=ASKED)
    batch = worker.core.plan()
    assert [row.num_tokens for row in batch] == [len(PROMPT)] * 2
    worker.core.finish(batch, worker.core.execute(batch), worker.now)
    assert {r.prompt_logprobs == expected() for r in worker.take().records} == {True}


def test_preemption_keeps_what_was_scored() -> None:
    """A leg that loses its blocks with half a prompt scored goes on from there."""
    sim = msgspec.structs.replace(SIM, num_blocks=16)
    runner = Watched(sim)
    worker = Worker(runner=runner, max_legs=3, max_batched_tokens=4)
    prompts = [[500, *PROMPT], [501, *PROMPT], [502, *range(100)]]
    sampling = msgspec.structs.replace(ASKED, max_tokens=40)
    for choice, prompt in enumerate(prompts):
        worker.run(choice=choice, sampling=sampling, prompt_ids=pack_ids(prompt))
    halfway = False
    while worker.steps(1):
        paused = [e.sequence for e in worker.core.batcher.waiting if e.preempted]
        halfway |= any(0 < len(s.scores or []) < len(s.prompt_ids) - 1 for s in paused)
    firsts = [r for r in worker.take().records if r.index == 0]

    assert halfway
    assert runner.scored == {prompt[0]: len(prompt) - 1 for prompt in prompts}
    assert [unpack_ids(r.prompt_logprobs.ids) for r in firsts if r.prompt_logprobs] == prompts
    quiet = Worker()
    quiet.run(sampling=sampling, prompt_ids=pack_ids(prompts[2]))
    quiet.steps()
    assert firsts[2].prompt_logprobs == quiet.take().records[0].prompt_logprobs


def test_adopting_from_the_start_sends_them_again() -> None:
    """From a later id they are not needed: who has an id has them."""
    runner = Watched()
    worker = Worker(runner=runner)
    worker.run(sampling=ASKED)
    worker.steps(4)
    ids = worker.take().ids
    worker.run(epoch=2, sampling=ASKED, output_ids=ids[:1], detokenizer="d-2")
    (late,) = worker.take().records
    worker.run(epoch=3, sampling=ASKED, detokenizer="d-3")
    (again,) = worker.take().records

    assert (late.index, late.prompt_logprobs) == (1, None)
    assert (again.index, again.prompt_logprobs) == (0, expected())
    assert runner.scored.total() == len(PROMPT) - 1


@pytest.mark.parametrize("delivered", [0, 1, 5])
def test_a_re_drive_elsewhere_scores_only_what_was_not_delivered(delivered: int) -> None:
    """With an id delivered the prompt's logprobs were too; then the cache may serve."""
    ids = truth()
    runner = Watched()
    worker = Worker(runner=runner)
    worker.run(choice=1, sampling=PLAIN)
    worker.steps()
    worker.take()
    worker.run(sampling=ASKED, output_ids=ids[:delivered])
    worker.steps()
    sent = worker.take()

    assert sent.records[0].prompt_logprobs == (None if delivered else expected())
    assert sent.started[0].num_cached_tokens == (32 if delivered else 0)
    assert sent.ids == ids[delivered:]


def test_a_large_record_travels_alone() -> None:
    """Several prompts together might not fit one message of the bus; ids still share one."""
    worker = Worker()
    for choice in range(4):
        worker.run(choice=choice, sampling=ASKED if choice < 2 else PLAIN)
    worker.steps()
    parts = [
        [(r.choice, r.index) for r in e.message.records]
        for e in worker.core.outbox.take()
        if e.subject == inbox("d-1")
    ]
    assert [part for part in parts if len(part) == 1] == [[(0, 0)], [(1, 0)]]
