"""What a worker writes to L2, what it does not, and what a stream gets back from there."""

from pathlib import Path

import msgspec
import pytest

from shared.ids import pack_ids, unpack_ids
from shared.kv import BLOCK_SIZE
from shared.messages import BlocksFound, BlocksStored, ReturnSlots, StoreBlocks
from shared.sampling import SamplingParams
from tests.services.gpu_worker.l2.tier_kit import LONG, SAMPLING, SIM, L2Worker, Tier, asked, warm


@pytest.fixture
def tier() -> Tier:
    return Tier()


def test_every_full_block_is_stored_once_while_the_leg_runs(tier: Tier) -> None:
    """Of prompt and output; what L2 is known to have is not written again."""
    warm(tier)
    assert len(tier.blocks) == (len(LONG) + 40 - 1) // BLOCK_SIZE
    stored = [message for message in tier.asked if isinstance(message, StoreBlocks)]
    assert sum(len(message.slots) for message in stored) == len(tier.blocks)
    worker = L2Worker(tier)
    tier.asked.clear()
    worker.run(**asked())
    worker.go(tier)
    worker.settle(tier)
    written = [message for message in tier.asked if isinstance(message, StoreBlocks)]
    assert sum(len(message.slots) for message in written) == len(tier.blocks) - 40


@pytest.mark.parametrize(("id_s", "written"), [(0.0001, 0), (0.0002, 42)])
def test_a_leg_is_written_once_it_is_dear_to_compute_again(
    tier: Tier, id_s: float, written: int
) -> None:
    """By what ids took on this worker, all blocks from the first on or none: 685 ids are 69 ms, or
    137 of which 100 would do.
    """
    worker = L2Worker(tier, l2_insure_ms=100.0)
    worker.core.batcher.pace.took(0, 1000, 1000 * id_s)
    worker.run(**asked())
    worker.go(tier)
    worker.settle(tier)
    assert len(tier.blocks) == written


def test_a_busy_moment_does_not_make_a_leg_dear(tier: Tier) -> None:
    """Ids that took three times as long just now are no reason to write as well; after two minutes
    they are what ids take here.
    """
    worker = L2Worker(tier, l2_insure_ms=100.0)
    for seconds, written in ((0.05, False), (1.0, False), (120.0, True)):
        worker.core.batcher.pace.took(0, 100_000, 100_000 * (0.0001 if seconds < 1 else 0.0003))
        worker.now += seconds
        worker.run(choice=int(seconds), **asked(salt=bytes([int(seconds)])))
        worker.go(tier)
        worker.settle(tier)
        assert bool(tier.blocks) == written


def test_a_leg_whose_numbers_went_wrong_is_not_stored(tier: Tier) -> None:
    """Not even the blocks before the fault was seen."""
    sim = msgspec.structs.replace(SIM, nan_id=LONG[3])
    worker = L2Worker(tier, sim)
    worker.run(**asked())
    worker.go(tier)
    worker.settle(tier)
    assert len(worker.take().failed) == 1
    assert tier.blocks == {}


def test_blocks_of_a_lossy_policy_stay_private(tier: Tier) -> None:
    """They are never named, so neither shared nor stored nor loaded."""
    warm(tier)
    tier.asked.clear()
    worker = L2Worker(tier)
    for choice in range(2):
        worker.run(choice=choice, **asked())
        worker.core.batcher.waiting[-1].sequence.private = True
        worker.go(tier)
    worker.settle(tier)
    assert [message for message in tier.asked if message.slots] == []
    assert worker.counters["l1_hit_tokens"] == 0
    assert worker.core.pool.num_cached == 0


def test_what_waits_too_long_is_dropped_oldest_first(tier: Tier) -> None:
    """The queue is bounded, and says what it has lost."""
    worker = L2Worker(tier, l2_queue_blocks=16)
    worker.run(**asked())
    worker.go(tier)
    worker.settle(tier)
    assert worker.counters["l2_dropped_blocks"] == 40 - 16
    assert worker.counters["l2_stored_blocks"] == len(tier.blocks) == 16 + 2


def test_blocks_that_left_l1_before_their_turn_are_dropped(tier: Tier) -> None:
    """What is in the queue holds no memory."""
    sim = msgspec.structs.replace(SIM, num_blocks=46)
    worker = L2Worker(tier, sim)
    worker.hear(tier, ready=False)
    worker.run(**asked())
    worker.tick()
    worker.steps()
    other = pack_ids([(11 * i) % 900 for i in range(40 * BLOCK_SIZE)])
    worker.run(choice=1, prompt_ids=other, sampling=SAMPLING)
    worker.tick()
    worker.steps()
    worker.settle(tier)
    assert worker.counters["l2_dropped_blocks"] > 30
    assert worker.counters["l2_stored_blocks"] == len(tier.blocks) > 0


def test_l2_is_told_once_a_minute_what_running_legs_need(tier: Tier) -> None:
    worker = L2Worker(tier)
    worker.run(**asked())
    worker.go(tier, steps=12)
    worker.settle(tier)
    tier.used.clear()
    worker.hear(tier)
    worker.tick(60.0)
    worker.hear(tier)
    worker.tick()
    worker.exchange(tier)
    assert tier.used[:40] == worker.core.batcher.running[0].sequence.block_hashes[:40]
    assert len(tier.used) == len(set(tier.used))


def test_what_l2_has_lost_it_is_given_again(tier: Tier) -> None:
    """Its server was started again: without the first block those after it are of no use."""
    worker = L2Worker(tier)
    worker.run(**asked())
    worker.go(tier, steps=12)
    worker.settle(tier)
    names = worker.core.batcher.running[0].sequence.block_hashes[:40]
    assert {*names} <= {*tier.blocks}
    tier.blocks.clear()
    for _ in range(8):
        worker.settle(tier)
    assert {*names} <= {*tier.blocks}


def test_a_store_that_nobody_answers_is_given_up(tier: Tier) -> None:
    """Its slots are asked for; the leg goes on."""
    worker = L2Worker(tier)
    worker.run(**asked())
    worker.tick()
    worker.exchange(tier)
    worker.tick()
    assert worker.slots_away == 0
    worker.steps(10)
    assert worker.slots_away > 0
    worker.tick(2.1)
    questions = worker.questions(tier)
    assert any(isinstance(question, ReturnSlots) for question in questions)
    for question in questions:
        if isinstance(question, ReturnSlots):
            tier.answer(question)
    worker.tick(0.1)
    assert worker.counters["l2_timeouts"] > 0
    assert worker.slots_away == 0


def test_an_answer_to_no_question_is_counted(tier: Tier) -> None:
    worker = L2Worker(tier)
    worker.core.receive(BlocksStored(store_id=7, kv_tier="kv-1", num_blocks=1), worker.now)
    worker.core.receive(BlocksFound(lookup_id=7, kv_tier="kv-1", num_blocks=1), worker.now)
    assert worker.counters["l2_late"] == 2


# --- resume ---


def test_a_stream_that_moves_takes_its_cache_along(tier: Tier) -> None:
    """3,000 ids of context, the worker dies: at most 64 of them are computed again."""
    sampling = SamplingParams(max_tokens=600, seed=3)
    prompt = pack_ids([(13 * i) % 900 for i in range(2600)])
    dying, other = L2Worker(tier), L2Worker(tier)
    dying.run(prompt_ids=prompt, sampling=sampling)
    dying.go(tier, steps=420)
    delivered = dying.take().ids
    assert len(delivered) > 380
    other.run(epoch=2, prompt_ids=prompt, sampling=sampling, output_ids=delivered)
    other.go(tier)

    alone = L2Worker(None)
    alone.run(prompt_ids=prompt, sampling=sampling)
    alone.steps()
    assert dying.counters["l2_dropped_blocks"] == 0
    assert 0 < other.counters["recomputed_tokens"] <= 64
    assert delivered + other.take().ids == alone.take().ids


def test_a_preempted_leg_comes_back_from_l2(tier: Tier) -> None:
    """What L1 has lost meanwhile is loaded, and the ids are those of a leg that was never
    preempted.
    """
    truth = warm(tier, sampling=SamplingParams(max_tokens=100, seed=7))
    sim = msgspec.structs.replace(SIM, num_blocks=48)
    worker = L2Worker(tier, sim)
    worker.run(priority=1, **asked(sampling=SamplingParams(max_tokens=100, seed=7)))
    worker.go(tier, steps=20)
    first = pack_ids([(17 * i) % 900 for i in range(5 * BLOCK_SIZE)])
    worker.run(choice=1, prompt_ids=first, sampling=SamplingParams(max_tokens=200, seed=1))
    worker.go(tier)

    sent = worker.take()
    ids = [i for record in sent.records if record.choice == 0 for i in unpack_ids(record.ids)]
    assert ids == truth
    assert worker.counters["preemptions"] > 0
    assert worker.counters["recomputed_tokens"] < 10 * BLOCK_SIZE


# --- time ---


def test_an_idle_engine_wakes_for_what_is_overdue(tier: Tier) -> None:
    """For the deadline of a load, for a store, for slots; but never without a cause."""
    worker = L2Worker(tier)
    assert worker.core.wake_at(worker.now) is None
    worker.run(**asked())
    worker.tick()
    assert worker.core.wake_at(worker.now) == worker.now + 0.25
    worker.tick(0.25)
    assert worker.core.wake_at(worker.now) is not None
    worker.exchange(tier)
    worker.go(tier)
    worker.settle(tier)
    assert worker.core.wake_at(worker.now) is None


def test_without_l2_no_memory_is_made(tier: Tier) -> None:
    """`l2 = false`: a tier that shows itself changes nothing."""
    before = len([*Path("/proc/self/fd").iterdir()])
    worker = L2Worker(tier, l2=False)
    worker.run(**asked())
    assert worker.core.step(worker.now)
    assert worker.questions(tier) == []
    assert len([*Path("/proc/self/fd").iterdir()]) == before
