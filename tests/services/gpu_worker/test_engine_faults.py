"""What cannot run is refused at once; what goes wrong hurts its own leg."""

from typing import Any

import msgspec
import pytest

from services.gpu_worker.execution import EngineBroken
from services.gpu_worker.runner import Outcome, Scheduled
from services.gpu_worker.simulated import SimulatedRunner
from shared.ids import pack_ids
from shared.sampling import SamplingParams
from shared.subjects import inbox
from tests.services.gpu_worker.engine_kit import END_ID, PROMPT, SIM, Worker, truth


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"prompt_ids": b""}, "invalid_request", "prompt"),
        ({"prompt_ids": pack_ids([5, 1000])}, "invalid_request", "prompt"),
        ({"prompt_ids": b"abc"}, "invalid_request", "prompt"),
        ({"prompt_ids": pack_ids([5] * 400)}, "context_length_exceeded", "prompt"),
        (
            {"sampling": SamplingParams(max_tokens=5, logit_bias={1000: 1.0})},
            "invalid_request",
            "logit_bias",
        ),
        (
            {"sampling": SamplingParams(max_tokens=5, allowed_token_ids=(1, 1000))},
            "invalid_request",
            "allowed_token_ids",
        ),
        (
            {"sampling": SamplingParams(max_tokens=5, bad_words=((1,), (2, -1)))},
            "invalid_request",
            "bad_words",
        ),
        (
            {"sampling": SamplingParams(max_tokens=5, bad_words=((1,), ()))},
            "invalid_request",
            "bad_words",
        ),
        (
            {"sampling": SamplingParams(max_tokens=5, prompt_logprobs=1 << 17)},
            "invalid_request",
            "prompt_logprobs",
        ),
        ({"salt": b"s" * 65}, "invalid_request", "cache_salt"),
        ({"sampling": SamplingParams(max_tokens=0)}, "invalid_request", "max_tokens"),
        ({"output_ids": list(range(12))}, "invalid_request", "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    changes: dict[str, Any], code: str, param: str
) -> None:
    """A typed error names the field; nothing is queued, and no retry elsewhere is asked for."""
    worker = Worker()
    worker.run(**changes)
    sent = worker.take()

    (failed,) = sent.failed
    assert (failed.code, failed.param, failed.retryable) == (code, param, False)
    assert sent.ended == [(inbox("s-1"), 1, "failed")]
    assert sent.started == []
    worker.assert_empty()
    worker.run(**changes)
    assert worker.take().failed == [], "a duplicate is not answered again"


def test_a_pool_smaller_than_the_context_is_the_limit() -> None:
    """A prompt that fits the model but never the memory is refused, not queued for ever."""
    worker = Worker(msgspec.structs.replace(SIM, num_blocks=2))
    worker.run()
    assert worker.core.max_model_len == 32
    assert [f.code for f in worker.take().failed] == ["context_length_exceeded"]


def test_a_full_queue_refuses_with_advice() -> None:
    """Over the limit, a leg is told to go elsewhere or come back."""
    worker = Worker(max_waiting=2)
    for choice in range(3):
        worker.run(choice=choice)
    (failed,) = worker.take().failed

    assert (failed.choice, failed.code, failed.retryable) == (2, "overloaded", True)
    assert failed.retry_after_s


@pytest.mark.parametrize(
    ("poison", "fault", "code"),
    [
        ("nan_id", "nan_logits", "internal"),
        ("raise_id", "raised", "internal"),
        ("oom_id", "out_of_memory", "unavailable"),
    ],
)
def test_a_poison_of_the_simulated_model_fails_its_own_leg(
    poison: str, fault: str, code: str
) -> None:
    """The others go on as if it had never been there."""
    worker = Worker(msgspec.structs.replace(SIM, **{poison: 77}))
    worker.run(choice=0)
    worker.run(choice=1, prompt_ids=pack_ids([77, *PROMPT]))
    worker.steps()
    sent = worker.take()

    (failed,) = sent.failed
    assert (failed.choice, failed.code, failed.retryable, failed.started) == (
        1,
        code,
        True,
        True,
    )
    assert sent.ids == truth()
    assert (inbox("s-1"), 1, "failed") in sent.ended
    assert worker.core.stats()[f"fault_{fault}"] == 1
    worker.assert_empty()


class Stubborn(SimulatedRunner):
    """Finds no id for prompts with 77 in them."""

    def execute(self, batch: list[Scheduled]) -> list[Outcome]:
        return [
            Outcome(fault="no_id_left") if 77 in row.sequence.prompt_ids else outcome
            for row, outcome in zip(batch, super().execute(batch), strict=True)
        ]


def test_masks_that_leave_no_id_are_the_clients_fault() -> None:
    """It would be so on every worker: no retry."""
    worker = Worker(runner=Stubborn(SIM, words=range(900), end_ids=[END_ID]))
    worker.run(choice=0)
    worker.run(choice=1, prompt_ids=pack_ids([77, *PROMPT]))
    worker.steps()
    sent = worker.take()

    (failed,) = sent.failed
    assert (failed.choice, failed.code, failed.retryable) == (1, "invalid_request", False)
    assert failed.param == "allowed_token_ids"
    assert worker.core.stats()["fault_no_id_left"] == 1
    assert sent.ids == truth()
    worker.assert_empty()


class Raises:
    """A model that raises on some prompts."""

    def __init__(self, bad: int, error: Exception) -> None:
        self.inner = SimulatedRunner(SIM, words=range(900), end_ids=[END_ID])
        self.spec = self.inner.spec
        self.bad = bad
        self.error = error

    def warm_up(self) -> None: ...

    def phase_bound_ms(self, batch: list[Scheduled]) -> int:
        return len(batch)

    def execute(self, batch: list[Scheduled]) -> list[Outcome]:
        if any(self.bad in row.sequence.prompt_ids for row in batch):
            raise self.error
        return self.inner.execute(batch)


@pytest.mark.parametrize(
    ("error", "code", "fault"),
    [
        (MemoryError("no room"), "unavailable", "fault_out_of_memory"),
        (ValueError("of shape"), "internal", "fault_raised"),
    ],
)
def test_a_row_that_raises_fails_alone(error: Exception, code: str, fault: str) -> None:
    """The step is repeated row by row: only the culprit's leg fails, the others lose nothing."""
    worker = Worker(runner=Raises(77, error))
    worker.run(choice=0)
    worker.run(choice=1, prompt_ids=pack_ids([77, 78]))
    worker.steps()
    sent = worker.take()

    assert [(f.choice, f.code, f.retryable) for f in sent.failed] == [(1, code, True)]
    assert str(error) not in sent.failed[0].detail, "what a library says is for the log"
    assert sent.ids == truth()
    assert (worker.core.stats()[fault], worker.core.stats()["steps_isolated"]) == (1, 1)
    worker.assert_empty()


def test_a_model_that_always_raises_ends_the_engine() -> None:
    """Three prompts in a row without a good row: it is the model, and only a restart can help."""
    worker = Worker(runner=Raises(1, MemoryError()))

    def keep_trying() -> None:
        for choice in range(5):
            worker.run(choice=choice, prompt_ids=pack_ids([1, choice]))
            worker.steps(1)

    with pytest.raises(EngineBroken):
        keep_trying()
    assert len(worker.take().failed) == 2


def test_one_request_that_always_raises_does_not_end_the_engine() -> None:
    """Its session drives it again, here too where there is no other worker; it fails each time."""
    worker = Worker(runner=Raises(77, MemoryError()))
    for epoch in range(1, 5):
        worker.run(epoch=epoch, prompt_ids=pack_ids([77, 78]))
        worker.steps()
    assert [failed.epoch for failed in worker.take().failed] == [1, 2, 3, 4]
    worker.assert_empty()
