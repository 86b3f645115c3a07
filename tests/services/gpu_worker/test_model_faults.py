"""Faults inside the real model, as its legs and their batch-mates see them."""

import math
from typing import Any

import pytest
import torch

from services.gpu_worker.model_runner import DecoderRunner
from services.gpu_worker.runner import Scheduled
from services.gpu_worker.sequence import Sequence
from shared.ids import pack_ids
from shared.sampling import SamplingParams
from tests.services.gpu_worker.engine_kit import Sent, Worker
from tests.services.gpu_worker.test_model_runner import load

PROMPTS = {choice: list(range(1000 + 100 * choice, 1040 + 100 * choice)) for choice in range(3)}
MARK = 1100  # in the prompt of choice 1
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, logprobs=2)


class Frail:
    """The model of `runner`, which meets `fault` in the company of the marked id."""

    def __init__(self, runner: DecoderRunner, fault: Any) -> None:
        self._model = runner.model
        self._fault = fault
        self.logits, self.clear = self._model.logits, self._model.clear

    def forward(self, batch: list[Scheduled]) -> None:
        if any(MARK in row.sequence.prompt_ids for row in batch):
            self._fault()
        self._model.forward(batch)


def too_much() -> None:
    torch.empty(1 << 50)


def too_much_for_a_gpu() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def wrong_shape() -> None:
    torch.zeros(2) @ torch.zeros(3)


@pytest.fixture(scope="module")
def runner() -> DecoderRunner:
    return load()


def drive(worker: Worker, *choices: int, epoch: int = 1) -> None:
    for choice in choices:
        ids = pack_ids(PROMPTS[choice])
        worker.run(epoch=epoch, choice=choice, prompt_ids=ids, sampling=GREEDY)


def said(sent: Sent, choice: int) -> list[Any]:
    """Every record of a leg but its epoch and what it says of the text."""
    return [(r.index, r.ids, r.end, r.logprobs) for r in sent.records if r.choice == choice]


@pytest.fixture(scope="module")
def alone(runner: DecoderRunner) -> dict[int, list[Any]]:
    """What each leg says on a worker of its own."""
    found = {}
    for choice in PROMPTS:
        worker = Worker(runner=runner)
        drive(worker, choice)
        worker.steps()
        found[choice] = said(worker.take(), choice)
    return found


@pytest.mark.parametrize(
    ("fault", "code", "counter"),
    [
        (too_much, "unavailable", "fault_out_of_memory"),
        (too_much_for_a_gpu, "unavailable", "fault_out_of_memory"),
        (wrong_shape, "internal", "fault_raised"),
    ],
)
def test_a_leg_that_makes_the_model_raise_fails_alone(
    runner: DecoderRunner, alone: dict[int, list[Any]], fault: Any, code: str, counter: str
) -> None:
    """Where memory runs out, its error says so; ids and logprobs of the others are unchanged."""
    frail = DecoderRunner(Frail(runner, fault), runner.spec)
    worker = Worker(runner=frail)
    drive(worker, 0, 1, 2)
    worker.steps()
    sent = worker.take()

    assert [(f.choice, f.code, f.retryable) for f in sent.failed] == [(1, code, True)]
    assert {choice: said(sent, choice) for choice in (0, 2)} == {0: alone[0], 2: alone[2]}
    assert worker.core.stats()[counter] == 1
    worker.assert_empty()


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_block_fails_its_leg_and_serves_nobody_again(
    runner: DecoderRunner, alone: dict[int, list[Any]], poison: float
) -> None:
    """Its batch-mates go on unchanged; the same prompt, asked again, is computed afresh."""
    worker = Worker(runner=runner)
    drive(worker, 0, 1, 2)
    worker.steps(2)
    (broken,) = [
        entry.sequence
        for entry in worker.core.batcher.running
        if entry.sequence.prompt_ids == PROMPTS[1]
    ]
    runner.model.pool.index_fill_(3, torch.tensor(broken.block_table[:1]), poison)
    worker.steps()
    first = worker.take()
    drive(worker, 1, epoch=2)
    worker.steps()
    second = worker.take()

    assert [(f.choice, f.code, f.retryable) for f in first.failed] == [(1, "internal", True)]
    assert {choice: said(first, choice) for choice in (0, 2)} == {0: alone[0], 2: alone[2]}
    assert worker.core.stats()["fault_nan_logits"] == 1
    assert second.started[0].num_cached_tokens == 0
    assert said(second, 1) == alone[1]
    worker.assert_empty()


def test_prompt_logprobs_that_are_no_numbers_fail_their_leg(runner: DecoderRunner) -> None:
    """In the middle of a prompt, before anything is sampled, and without harm to the other row."""
    sound, broken = (Sequence(PROMPTS[choice], GREEDY) for choice in (0, 1))
    sound.block_table, broken.block_table = [0, 1, 2], [3, 4, 5]
    expected = runner.execute([Scheduled(sound, 40)])
    broken.scores = []
    (first,) = runner.execute([Scheduled(broken, 16)])
    broken.scores, broken.num_computed_tokens = [*first.scores], 16
    runner.model.pool.index_fill_(3, torch.tensor([3]), math.nan)
    outcomes = runner.execute([Scheduled(broken, 8), Scheduled(sound, 40)])
    runner.model.pool.index_fill_(3, torch.tensor([3]), 0)

    assert len(first.scores) == 16
    assert (outcomes[0].fault, outcomes[0].scores) == ("nan_logits", ())
    assert outcomes[1:] == expected
