"""Who runs when; and whatever happens on the way, a sequence's ids are those it makes alone."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.batcher import Batcher
from services.gpu_worker.block_pool import BlockPool
from services.gpu_worker.config import SimConfig
from services.gpu_worker.pace import IDS_MIN, Pace
from services.gpu_worker.runner import Outcome, Scheduled
from services.gpu_worker.sequence import Sequence
from services.gpu_worker.simulated import SimulatedRunner
from shared.kv import BLOCK_SIZE, block_hashes
from shared.sampling import SamplingParams

PREFIX = list(range(1, 41))


class Bench:
    """A batcher and a simulated model, driven by hand."""

    def __init__(self, num_blocks: int = 64, max_legs: int = 8, max_tokens: int = 64) -> None:
        config = SimConfig(num_blocks=num_blocks, vocab_size=1000)
        self.runner = SimulatedRunner(config)
        self.batcher = Batcher(
            BlockPool(num_blocks, BLOCK_SIZE),
            Pace(slowdown=2.5),
            max_legs=max_legs,
            max_batched_tokens=max_tokens,
        )

    def add(
        self, prompt: list[int], length: int = 8, output: tuple[int, ...] = (), **place: Any
    ) -> Sequence:
        sampling = SamplingParams(max_tokens=length, seed=len(prompt))
        sequence = Sequence(prompt, sampling, output_ids=[*output])
        self.batcher.add(sequence, **place)
        return sequence

    def step(self) -> list[Scheduled]:
        batch = self.batcher.schedule()
        self.batcher.check_integrity()
        self.check_policy(batch)
        self.batcher.commit(batch, self.runner.execute(batch))
        for row in batch:
            if len(row.sequence.output_ids) == row.sequence.sampling.max_tokens:
                self.batcher.remove(row.sequence)
        self.batcher.check_integrity()
        return batch

    def check_policy(self, batch: list[Scheduled]) -> None:
        batcher = self.batcher
        assert sum(row.num_tokens for row in batch) <= batcher.max_batched_tokens
        assert len({row.sequence for row in batch}) == len(batch)
        assert all(row.num_tokens >= 1 for row in batch)
        if any(entry.alone for entry in batcher.running):
            assert len(batcher.running) == 1
        for row in batch:
            end = row.sequence.num_computed_tokens + row.num_tokens
            assert end <= row.sequence.num_tokens
            assert end <= len(row.sequence.block_table) * BLOCK_SIZE

    def run(self) -> None:
        while self.step():
            pass
        assert not self.batcher.waiting
        assert self.batcher.pool.num_available == self.batcher.pool.num_blocks


def alone(sequence: Sequence) -> list[int]:
    """What the ids of `sequence` are when it has a machine of its own."""
    bench = Bench(max_tokens=1000)
    twin = Sequence(list(sequence.prompt_ids), sequence.sampling, sequence.salt)
    bench.batcher.add(twin)
    bench.run()
    return twin.output_ids


def rows(batch: list[Scheduled]) -> list[tuple[Sequence, int]]:
    return [(row.sequence, row.num_tokens) for row in batch]


prompts = st.builds(
    lambda shared, own: PREFIX[:shared] + own,
    st.sampled_from([0, 15, 16, 17, 32, 40]),
    st.lists(st.integers(0, 99), min_size=1, max_size=40),
)
jobs = st.tuples(
    prompts,
    st.integers(1, 40),  # output length
    st.integers(0, 2),  # priority
    st.booleans(),  # alone
    st.integers(0, 6),  # steps before the next arrives
    st.none() | st.integers(0, 30),  # cancelled after so many steps
)


@settings(max_examples=80, deadline=None)
@given(
    work=st.lists(jobs, min_size=1, max_size=8),
    num_blocks=st.integers(8, 20),
    max_legs=st.integers(1, 6),
    max_tokens=st.integers(6, 64),
)
def test_every_sequence_makes_the_ids_it_makes_alone(
    work: list[tuple[list[int], int, int, bool, int, int | None]],
    num_blocks: int,
    max_legs: int,
    max_tokens: int,
) -> None:
    """Batching, chunking, sharing, preemption and cancels change no id and leak no block."""
    bench = Bench(num_blocks, max_legs, max_tokens)
    cancels: dict[Sequence, int] = {}
    sequences = []
    for prompt, length, priority, by_itself, steps, cancel_after in work:
        sequence = bench.add(prompt, length, priority=priority, alone=by_itself)
        sequences.append(sequence)
        if cancel_after is not None:
            cancels[sequence] = cancel_after
        for _ in range(steps):
            bench.step()
            cancel_due(bench, cancels)
    while bench.step():
        cancel_due(bench, cancels)
    bench.run()

    for sequence in sequences:
        expected = alone(sequence)
        assert sequence.output_ids == expected[: len(sequence.output_ids)]
        if sequence not in cancels:
            assert sequence.output_ids == expected


def cancel_due(bench: Bench, cancels: dict[Sequence, int]) -> None:
    for sequence in list(cancels):
        cancels[sequence] -= 1
        in_hand = sequence in [e.sequence for e in bench.batcher.waiting + bench.batcher.running]
        if cancels[sequence] <= 0 and in_hand:
            bench.batcher.remove(sequence)


def test_decode_rows_go_first_and_prefill_takes_the_rest_of_the_budget() -> None:
    """A long prompt is computed in chunks beside running streams, which lose no step to it."""
    bench = Bench(max_tokens=20)
    stream = bench.add([1, 2, 3])
    bench.step()
    prompt = bench.add(list(range(50)))

    assert rows(bench.step()) == [(stream, 1), (prompt, 19)]
    assert rows(bench.step()) == [(stream, 1), (prompt, 19)]
    assert rows(bench.step()) == [(stream, 1), (prompt, 12)]
    assert rows(bench.step()) == [(stream, 1), (prompt, 1)]


def test_lower_priority_numbers_go_first_then_arrival() -> None:
    """The order of admission is priority, then arrival, also against a prompt that is part-way."""
    bench = Bench(max_tokens=10)
    late = bench.add(list(range(100, 125)), priority=5)
    bench.step()
    second, first = bench.add([7] * 6, priority=1), bench.add([8] * 6, priority=0)

    assert rows(bench.step()) == [(first, 6), (second, 4)]
    assert rows(bench.step())[1:] == [(second, 2), (late, 7)]


def test_a_stream_that_comes_from_elsewhere_goes_before_new_prompts() -> None:
    """Its reader has begun to read."""
    bench = Bench(max_tokens=16)
    new = bench.add([5] * 40)
    moved = bench.add([6] * 12, output=(7, 8))
    more_important = bench.add([9] * 4, priority=-1)
    assert bench.step() == [(more_important, 4), (moved, 12)]
    assert bench.step() == [(more_important, 1), (moved, 2), (new, 13)]


def test_prompts_are_paced_but_not_while_a_stream_stands_still() -> None:
    """Beside a row that decodes a prompt takes few ids; a lost stream takes what there is."""
    bench = Bench(max_tokens=64)
    reader = bench.add([5], length=30)
    bench.step()
    for decoding, prompt_ids in ((1, 0), (1, 10)):
        bench.batcher.pace.took(decoding, prompt_ids, 1.0 + prompt_ids)
    new = bench.add([6] * 200)
    assert bench.step() == [(reader, 1), (new, IDS_MIN)]
    moved = bench.add([7] * 30, output=(8, 9))
    assert bench.step() == [(reader, 1), (moved, 32), (new, 31)]
    assert bench.step() == [(moved, 1), (reader, 1), (new, IDS_MIN)]


def test_out_of_blocks_the_last_in_order_is_preempted_and_goes_on_exactly() -> None:
    """The older leg keeps its blocks; the younger keeps its ids and resumes to the same end."""
    bench = Bench(num_blocks=5)
    older, younger = bench.add(list(range(30)), 30), bench.add(list(range(200, 225)), 30)
    while not bench.batcher.num_preemptions:
        bench.step()

    assert younger.output_ids
    assert bench.batcher.state(younger) == "paused"
    assert bench.batcher.state(older) == "decode"
    bench.run()
    assert older.output_ids == alone(older)
    assert younger.output_ids == alone(younger)
    assert younger.num_cached_tokens == 0, "its own blocks, found again, are no saving"


def test_priority_decides_who_is_preempted() -> None:
    """An important leg that came later takes the blocks of an unimportant one that came before."""
    bench = Bench(num_blocks=5)
    low, high = bench.add(list(range(30)), 30, priority=9), bench.add(list(range(50, 75)), 30)
    while not bench.batcher.num_preemptions:
        bench.step()

    assert bench.batcher.state(low) == "paused"
    assert bench.batcher.state(high) == "decode"


def test_a_prefix_is_computed_once() -> None:
    """A second prompt finds the full blocks of the first, but always computes its last id."""
    bench = Bench()
    bench.add(PREFIX[:32])
    bench.run()
    again = bench.add(PREFIX[:32])
    batch = bench.step()

    assert again.num_cached_tokens == 16
    assert rows(batch) == [(again, 16)]


def test_legs_of_one_prompt_wait_for_the_blocks_that_the_first_computes() -> None:
    """n legs that arrive together compute their common prompt once."""
    bench = Bench(max_tokens=100)
    first, second = bench.add(list(PREFIX)), bench.add(list(PREFIX))

    assert rows(bench.step()) == [(first, 40)]
    assert rows(bench.step()) == [(first, 1), (second, 8)]
    assert second.block_table[:2] == first.block_table[:2]


def test_answers_are_cached_too() -> None:
    """The next turn of a conversation finds the blocks of the answer before it."""
    bench = Bench()
    turn = bench.add(list(range(10)), 30)
    bench.run()
    following = bench.add(turn.prompt_ids + turn.output_ids + [5, 6, 7])
    bench.step()

    assert following.num_cached_tokens == 32


def test_tenants_share_nothing() -> None:
    """Another salt gives other names to the same ids."""
    bench = Bench()
    for salt in (b"a" * 32, b"b" * 32):
        sequence = Sequence(list(PREFIX), SamplingParams(max_tokens=2), salt)
        bench.batcher.add(sequence)
        bench.run()
        assert sequence.num_cached_tokens == 0
        assert sequence.block_hashes == block_hashes(PREFIX, salt)


def test_a_leg_alone_waits_for_an_empty_worker_and_holds_others_back() -> None:
    """A suspect makes its first id while nothing else runs, in its turn; then it is none."""
    bench = Bench()
    before = bench.add([1, 2], 3)
    bench.step()
    suspect, after = bench.add([3, 4], 2, alone=True), bench.add([5, 6], 2)
    order = [[row.sequence for row in bench.step()] for _ in range(5)]

    assert order == [[before], [before], [suspect], [suspect, after], [after]]


def test_a_big_prompt_is_not_starved_by_small_ones() -> None:
    """What does not fit yet holds back what came after it."""
    bench = Bench(num_blocks=6)
    bench.add(list(range(40)), 8)
    bench.step()
    big, small = bench.add(list(range(100, 180)), 2), bench.add([1], 2)
    started: list[Sequence] = []
    while batch := bench.step():
        started += [row.sequence for row in batch if row.sequence not in started]

    assert started[-2:] == [big, small]


def test_a_newcomer_leaves_running_legs_a_block_to_grow_into() -> None:
    """Admission that would take the last block only leads to preemption, so it waits."""
    bench = Bench(num_blocks=5)
    running, newcomer = bench.add(list(range(40)), 24), bench.add([7] * 20, 2)
    bench.run()

    assert bench.batcher.num_preemptions == 0
    assert running.output_ids == alone(running)
    assert newcomer.output_ids == alone(newcomer)


def test_a_row_with_a_fault_stays_as_it_was() -> None:
    """No id, no progress and no named block comes from a row that went wrong."""
    bench = Bench()
    sequence = bench.add(list(PREFIX))
    batch = bench.batcher.schedule()
    bench.batcher.commit(batch, [Outcome(fault="nan_logits")])

    assert sequence.output_ids == []
    assert sequence.num_computed_tokens == 0
    assert bench.batcher.num_reusable_tokens(sequence) == 0


def test_forgotten_blocks_are_not_found_again() -> None:
    """After a fault nobody reuses what the faulty sequence wrote."""
    bench = Bench()
    sequence = bench.add(list(PREFIX))
    bench.step()
    bench.batcher.remove(sequence, forget=True)

    assert bench.batcher.num_reusable_tokens(Sequence(list(PREFIX), sequence.sampling)) == 0


def test_the_simulated_model_reads_through_the_block_table() -> None:
    """The equality above has teeth: a wrong table gives other ids."""
    bench = Bench()
    sequence = bench.add(list(PREFIX), 7)
    bench.step()
    sequence.block_table.reverse()
    bench.run()

    assert sequence.output_ids[0] == alone(sequence)[0]
    assert sequence.output_ids[1:] != alone(sequence)[1:]


def test_the_simulated_model_knows_what_was_never_written() -> None:
    """Claiming more computed ids than there are is found at once."""
    bench = Bench()
    sequence = bench.add(list(PREFIX))
    bench.batcher.schedule()
    sequence.num_computed_tokens = 39
    with pytest.raises(AssertionError, match="never written"):
        bench.runner.execute([Scheduled(sequence, 1)])
