"""Prompts take what running streams can spare of a step, whatever the machine's speed."""

import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.batcher import Batcher
from services.gpu_worker.block_pool import BlockPool
from services.gpu_worker.pace import IDS_MIN, Pace
from services.gpu_worker.runner import Outcome
from services.gpu_worker.sequence import Sequence
from shared.kv import BLOCK_SIZE
from shared.sampling import SamplingParams

SLOWDOWN = 2.5
LIMIT = 256


class Machine(NamedTuple):
    """What steps cost, in ms."""

    fixed: float = 8.0
    row: float = 0.8
    prompt_id: float = 0.6
    per_1000_before: float = 0.4  # more for a prompt id that has 1,000 others before it

    def seconds(self, decoding: int, prompt_ids: int, at: int = 0) -> float:
        each = self.prompt_id + self.per_1000_before * at / 1000
        return (self.fixed + self.row * decoding + each * prompt_ids) / 1000


def known(machine: Machine, decoding: int) -> Pace:
    """A pace that has seen a prompt and some steps without."""
    pace = Pace(SLOWDOWN)
    pace.took(0, LIMIT, machine.seconds(0, LIMIT))
    for _ in range(20):
        pace.took(decoding, 0, machine.seconds(decoding, 0))
    return pace


def test_a_prompt_has_the_step_to_itself_while_nobody_decodes() -> None:
    """There is nobody to wait for it, fast or slow."""
    assert known(Machine(prompt_id=1000), decoding=4).num_prompt_ids(0, LIMIT) == LIMIT


def test_what_was_not_measured_limits_nothing() -> None:
    """A worker that just began takes whole chunks, and so learns what they cost."""
    pace = Pace(SLOWDOWN)
    assert pace.num_prompt_ids(3, LIMIT) == LIMIT
    pace.took(3, 0, 0.01)
    assert pace.num_prompt_ids(3, LIMIT) == LIMIT


@settings(max_examples=60, deadline=None)
@given(
    machine=st.builds(
        Machine,
        fixed=st.floats(1, 50),
        row=st.floats(0.1, 5),
        prompt_id=st.floats(0.05, 20),
        per_1000_before=st.floats(0, 2),
    ),
    decoding=st.integers(1, 64),
    noise=st.floats(0, 0.1),
    seed=st.integers(0, 99),
)
def test_steps_with_a_long_prompt_keep_to_their_time(
    machine: Machine, decoding: int, noise: float, seed: int
) -> None:
    """On any machine the estimates settle in ten steps. Then each step lasts about as long as it
    may, but for those that compute the fewest ids, or all that there are.
    """
    draw = random.Random(seed)
    pace = known(machine, decoding)
    alone = machine.seconds(decoding, 0)
    at = step = 0
    while at < 6000:
        prompt_ids = pace.num_prompt_ids(decoding, LIMIT)
        assert prompt_ids in (0, *range(IDS_MIN, LIMIT + 1))
        seconds = machine.seconds(decoding, prompt_ids, at)
        if step > 10 and prompt_ids > IDS_MIN:
            assert seconds < SLOWDOWN * alone * (1.3 + 2 * noise)
        if step > 10 and 0 < prompt_ids < LIMIT:
            one_more = machine.seconds(decoding, prompt_ids + 1, at)
            assert one_more > SLOWDOWN * alone * (0.7 - 2 * noise)
        pace.took(decoding, prompt_ids, seconds * draw.uniform(1 - noise, 1 + noise))
        at, step = at + prompt_ids, step + 1


@pytest.mark.parametrize("change", [0.25, 4.0])
def test_a_machine_that_changes_its_speed_is_followed_while_prompts_never_end(
    change: float,
) -> None:
    """Now and then a step without prompt ids shows what decoding takes by now."""
    before = Machine()
    after = Machine(*(change * cost for cost in before))
    pace = known(before, decoding=8)
    for _ in range(700):
        prompt_ids = pace.num_prompt_ids(8, LIMIT)
        pace.took(8, prompt_ids, after.seconds(8, prompt_ids))

    assert pace.decode_s(8) == pytest.approx(after.seconds(8, 0), rel=0.1)
    settled = known(after, decoding=8).num_prompt_ids(8, LIMIT)
    assert pace.num_prompt_ids(8, LIMIT) == pytest.approx(settled, rel=0.3)


def test_one_step_that_was_held_up_changes_little() -> None:
    """A process that was stopped for a while does not take a long step for a usual one."""
    pace = known(Machine(), decoding=8)
    expected = pace.num_prompt_ids(8, LIMIT)
    pace.took(8, 0, 3.0)

    assert pace.num_prompt_ids(8, LIMIT) < 1.5 * expected


def test_every_prompt_comes_to_its_end_beside_a_stream() -> None:
    """On a machine for which each prompt id is far too slow, all make a little way each step."""
    batcher = Batcher(
        BlockPool(64, BLOCK_SIZE), known(Machine(prompt_id=1e6), 1), max_legs=4,
        max_batched_tokens=64,
    )  # fmt: skip
    stream, *prompts = (
        Sequence([number] * 100, SamplingParams(max_tokens=1000)) for number in range(4)
    )
    batcher.add(stream)
    steps = 0
    while not all(prompt.output_ids for prompt in prompts):
        batch = batcher.schedule()
        if steps == 1:
            for prompt in prompts:
                batcher.add(prompt)
        if steps > 1:
            assert (batch[0].sequence, batch[0].num_tokens) == (stream, 1)
            assert sum(row.num_tokens for row in batch if not row.samples) <= IDS_MIN
        ends = [Outcome(7) if row.samples else Outcome() for row in batch]
        batcher.commit(batch, ends)
        steps += 1

    assert steps < 3 * 100 / IDS_MIN + 10
