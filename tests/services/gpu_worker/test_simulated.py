"""The simulated model: deterministic, readable, and as obedient as the real one."""

import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.config import SimConfig
from services.gpu_worker.runner import Outcome, Scheduled
from services.gpu_worker.sequence import Sequence
from services.gpu_worker.simulated import SimulatedRunner, readable_words
from shared.ids import unpack_ids
from shared.kv import BLOCK_SIZE
from shared.model_files import Vocabulary
from shared.sampling import SamplingParams

SIM = SimConfig(num_blocks=32, vocab_size=300, output_tokens_min=5, output_tokens_max=9)


def generate(prompt: list[int], chunk: int = 1000, **sampling: Any) -> list[Outcome]:
    """Everything sampled until the end id or max_tokens, prefilled in chunks."""
    runner = SimulatedRunner(SIM, words=range(200), end_ids=[299])
    sequence = Sequence(prompt, SamplingParams(**{"max_tokens": 20, **sampling}))
    sequence.block_table = list(range(-(-(len(prompt) + 20) // BLOCK_SIZE)))
    sampled = []
    while len(sequence.output_ids) < sequence.sampling.max_tokens:
        missing = sequence.num_tokens - sequence.num_computed_tokens
        row = Scheduled(sequence, min(chunk, missing))
        (outcome,) = runner.execute([row])
        sequence.num_computed_tokens += row.num_tokens
        if outcome.token_id is not None:
            sampled.append(outcome)
            sequence.output_ids.append(outcome.token_id)
            if outcome.token_id == 299:
                break
    return sampled


def ids(prompt: list[int], chunk: int = 1000, **sampling: Any) -> list[int]:
    return [outcome.token_id for outcome in generate(prompt, chunk, **sampling)]


@settings(max_examples=50, deadline=None)
@given(prompt=st.lists(st.integers(0, 299), min_size=1, max_size=60), chunk=st.integers(1, 70))
def test_chunks_do_not_matter(prompt: list[int], chunk: int) -> None:
    """The answer is a function of the ids, not of how they were computed."""
    assert ids(prompt, chunk) == ids(prompt)


@settings(max_examples=50, deadline=None)
@given(prompt=st.lists(st.integers(0, 299), min_size=1, max_size=60), data=st.data())
def test_every_id_of_the_prompt_matters(prompt: list[int], data: st.DataObject) -> None:
    """One other id anywhere gives another answer: a splice or a bleed shows."""
    index = data.draw(st.integers(0, len(prompt) - 1))
    other = [*prompt[:index], (prompt[index] + 1) % 300, *prompt[index + 1 :]]

    assert ids(other, ignore_eos=True) != ids(prompt, ignore_eos=True)


def test_answers_end_by_their_prompt() -> None:
    """Lengths are within bounds, differ between prompts, and obey ignore_eos and min_tokens."""
    lengths = {len(ids([n])) for n in range(50)}

    assert lengths == {5, 6, 7, 8, 9}
    assert len(ids([1], ignore_eos=True)) == 20
    assert 299 not in ids([1], min_tokens=20)
    assert ids([1], min_tokens=15)[15:] == [299]


def test_seeds_tell_legs_apart_unless_greedy() -> None:
    """n legs of one prompt differ; greedy ones do not."""
    assert ids([1, 2], seed=1) != ids([1, 2], seed=2)
    assert ids([1, 2], seed=1) == ids([1, 2], seed=1)
    assert ids([1, 2], seed=1, temperature=0.0) == ids([1, 2], seed=2, temperature=0.0)


def test_logprobs_come_when_asked_for() -> None:
    """None, the chosen id only, or the k best with the chosen one first."""
    assert all(outcome.logprobs is None for outcome in generate([1]))
    (chosen, *_) = generate([1], logprobs=0)
    assert chosen.logprobs is not None
    assert chosen.logprobs.top_ids == b""
    (best, *_) = generate([1], logprobs=3)
    assert best.logprobs is not None
    assert unpack_ids(best.logprobs.top_ids)[0] == best.token_id
    assert len(best.logprobs.top_logprobs) == 3
    assert list(best.logprobs.top_logprobs) == sorted(best.logprobs.top_logprobs, reverse=True)


def test_words_are_readable() -> None:
    """Only plain words with a space before them, never a special id."""
    vocabulary = Vocabulary([b"a", b" the", b" The", b" sea", b" x", b"\xff", b" end"], special=[6])
    words = readable_words(vocabulary)

    assert words == [1, 3]
    assert re.fullmatch(r"( [a-z]+)+", vocabulary.text(words, skip_special_tokens=True))
