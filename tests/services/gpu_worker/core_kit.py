"""Legs through the whole core of a worker over a real model: batcher, block pool, prefix cache."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from services.gpu_worker.runner import ModelRunner, Outcome, Scheduled
from shared.ids import pack_ids, unpack_ids
from shared.messages import TokenLogprobs
from shared.sampling import SamplingParams
from tests.services.gpu_worker.engine_kit import Worker


class Ask(NamedTuple):
    """A leg, of whose answer `output_ids` were delivered before. It minds no end id."""

    prompt_ids: list[int]
    sampling: SamplingParams
    output_ids: Sequence[int] = ()


class Answer(NamedTuple):
    """What a leg said: its new ids, and logprobs where it asked for them."""

    ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]


class Row(NamedTuple):
    """What a step computed of one leg."""

    num_tokens: int
    samples: bool


class Watch:
    """`runner`, of which the core sees only the first `num_blocks` blocks; keeps what steps did."""

    def __init__(self, runner: ModelRunner, num_blocks: int) -> None:
        assert num_blocks <= runner.spec.num_blocks
        self.spec = msgspec.structs.replace(runner.spec, num_blocks=num_blocks)
        self.steps: list[list[Row]] = []
        self._runner = runner

    def warm_up(self) -> None:
        self._runner.warm_up()

    def phase_bound_ms(self, batch: list[Scheduled]) -> int:
        return self._runner.phase_bound_ms(batch)

    def execute(self, batch: list[Scheduled]) -> list[Outcome]:
        self.steps.append([Row(row.num_tokens, row.samples) for row in batch])
        return self._runner.execute(batch)


class Core:
    """Takes at most `batch` legs at once; the last of a full batch gets `chunk` prompt ids a step,
    since the others take one id each.
    """

    def __init__(
        self, runner: ModelRunner, *, batch: int, chunk: int, num_blocks: int | None = None
    ) -> None:
        self._watch = Watch(runner, num_blocks or runner.spec.num_blocks)
        self._worker = Worker(
            runner=self._watch,
            max_legs=batch,
            max_batched_tokens=batch - 1 + chunk,
            lease_s=1e9,  # nobody renews here
        )
        self._asked = 0
        self.num_cached_tokens: list[int] = []  # per leg, as it came

    @property
    def steps(self) -> list[list[Row]]:
        return self._watch.steps

    @property
    def num_preemptions(self) -> int:
        return self._worker.core.batcher.num_preemptions

    def answers(self, asks: list[Ask]) -> list[Answer]:
        """Of legs that come together, but for the last: it comes when the others decode."""
        first, core = self._asked, self._worker.core
        for ask in asks[:-1]:
            self._take(ask)
        while core.prefill_tokens_waiting:
            self._worker.steps(1)
        self._take(asks[-1])
        self._worker.steps()
        self._worker.assert_empty()
        sent = self._worker.take()
        assert not sent.failed
        self.num_cached_tokens += [started.num_cached_tokens for started in sent.started]
        answers = [Answer([], [], []) for _ in asks]
        for record in sent.records:
            ask, answer = asks[record.choice - first], answers[record.choice - first]
            assert record.index == len(ask.output_ids) + len(answer.ids)
            answer.ids.extend(unpack_ids(record.ids))
            answer.logprobs.extend(record.logprobs or [])
            if record.prompt_logprobs is not None:
                answer.prompt_logprobs.extend(record.prompt_logprobs.logprobs)
        return answers

    def _take(self, ask: Ask) -> None:
        self._worker.run(
            choice=self._asked,
            prompt_ids=pack_ids(ask.prompt_ids),
            output_ids=ask.output_ids,
            sampling=msgspec.structs.replace(ask.sampling, ignore_eos=True),
        )
        self._asked += 1
