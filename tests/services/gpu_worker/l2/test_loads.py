"""A leg that lacks blocks: what L2 gives, and that no fault of L2 changes an id."""

import subprocess
from collections.abc import Callable

import msgspec
import pytest

from shared.ids import pack_ids, unpack_ids
from shared.kv import BLOCK_SIZE
from shared.messages import BlocksFound, Cancel, LookupBlocks
from shared.sampling import SamplingParams
from tests.services.gpu_worker.l2.tier_kit import LONG, SAMPLING, SIM, L2Worker, Tier, asked, warm


@pytest.fixture
def tier() -> Tier:
    return Tier()


def test_a_second_worker_computes_only_the_tail(tier: Tier) -> None:
    """Its ids are the same, and the gateway is told how much was cached."""
    truth = warm(tier)
    worker = L2Worker(tier)
    worker.run(**asked())
    worker.go(tier)
    sent = worker.take()

    assert sent.ids == truth
    assert [started.num_cached_tokens for started in sent.started] == [40 * BLOCK_SIZE]
    assert worker.counters["l2_hit_tokens"] == 40 * BLOCK_SIZE
    assert worker.counters["l1_hit_tokens"] == 0
    assert worker.counters["queried_tokens"] == len(LONG)
    worker.assert_empty()


def test_what_is_in_l1_is_not_asked_for(tier: Tier) -> None:
    warm(tier)
    worker = L2Worker(tier)
    worker.run(prompt_ids=pack_ids(LONG[: 10 * BLOCK_SIZE + 1]), sampling=SAMPLING)
    worker.go(tier)
    tier.asked.clear()
    worker.run(choice=1, **asked())
    worker.go(tier)

    assert sum(len(lookup.slots) for lookup in tier.lookups()) == 30
    assert worker.counters["l1_hit_tokens"] == 10 * BLOCK_SIZE
    assert worker.counters["l2_hit_tokens"] == (10 + 30) * BLOCK_SIZE


def test_a_prefix_that_is_not_worth_it_is_not_asked_for(tier: Tier) -> None:
    worker = L2Worker(tier, l2_min_blocks=41)
    worker.run(**asked())
    worker.go(tier)
    assert tier.lookups() == []


@pytest.mark.parametrize("slots", [8, 20, 200])
def test_a_prefix_longer_than_the_slots_comes_in_chunks(tier: Tier, slots: int) -> None:
    """All of it, however few slots there are."""
    truth = warm(tier)
    tier.asked.clear()
    worker = L2Worker(tier, l2_slots_bytes=slots * 128)
    worker.run(**asked())
    worker.go(tier)

    assert worker.take().ids == truth
    assert worker.counters["l2_hit_tokens"] == 40 * BLOCK_SIZE
    assert all(len(lookup.slots) <= slots // 4 for lookup in tier.lookups())


@pytest.mark.parametrize(("id_s", "all_come"), [(0.01, True), (0.0001, False)])
def test_a_leg_waits_on_while_its_chunks_come(tier: Tier, id_s: float, all_come: bool) -> None:
    """0.2 s each: in all longer than one answer may take, but only if computing takes longer."""
    truth = warm(tier)
    worker = L2Worker(tier, l2_slots_bytes=8 * 128)
    worker.core.batcher.pace.took(0, 100, 100 * id_s)
    worker.run(**asked())
    worker.wait(tier)
    worker.go(tier)

    assert worker.take().ids == truth
    assert (worker.counters["l2_hit_tokens"] == 40 * BLOCK_SIZE) == all_come


def test_legs_that_lack_the_same_blocks_load_them_once(tier: Tier) -> None:
    """The second waits for the first's, and shares them."""
    truth = warm(tier)
    worker = L2Worker(tier)
    tier.asked.clear()
    for choice in range(3):
        worker.run(choice=choice, **asked())
    worker.go(tier)

    assert sum(len(lookup.slots) for lookup in tier.lookups()) == 40
    sent = worker.take()
    assert sorted(sent.ids) == sorted(3 * truth)
    assert [started.num_cached_tokens for started in sent.started] == 3 * [40 * BLOCK_SIZE]


def test_who_waits_for_another_to_load_waits_as_long(tier: Tier) -> None:
    """Else it would compute what is on its way."""
    warm(tier)
    tier.asked.clear()
    worker = L2Worker(tier, l2_slots_bytes=8 * 128)
    worker.core.batcher.pace.took(0, 100, 1.0)
    for choice in range(2):
        worker.run(choice=choice, **asked())
    worker.wait(tier)
    worker.go(tier)

    assert sum(len(lookup.slots) for lookup in tier.lookups()) == 40
    assert worker.counters["l2_hit_tokens"] + worker.counters["l1_hit_tokens"] == 80 * BLOCK_SIZE


def test_others_go_on_while_a_leg_waits(tier: Tier) -> None:
    """A leg that L2 has nothing to say of is not held back by one that waits, and decodes."""
    warm(tier)
    worker = L2Worker(tier)
    worker.run(**asked())
    worker.tick()
    assert len(worker.questions(tier)) == 1
    worker.run(choice=1, prompt_ids=pack_ids(range(5)), sampling=SAMPLING)
    worker.tick()
    worker.steps(10)

    assert {record.choice for record in worker.take().records} == {1}


@pytest.mark.parametrize("spoil", ["lost", "late", "twice", "miss"])
def test_an_answer_that_is_not_as_it_should_be_costs_time_only(tier: Tier, spoil: str) -> None:
    """Lost, late, twice, empty: the ids are the same, the slots come back."""
    truth = warm(tier)
    worker = L2Worker(tier)
    worker.run(**asked())
    worker.tick()
    answers = [a for question in worker.questions(tier) for a in tier.answer(question)]
    if spoil == "miss":
        answers = [msgspec.structs.replace(a, num_blocks=0, num_loaded=0) for a in answers]
    for answer in answers if spoil in {"twice", "miss"} else []:
        worker.core.receive(answer, worker.now)
        worker.core.receive(answer, worker.now)
    worker.tick(0.3)
    for answer in answers if spoil == "late" else []:
        worker.core.receive(answer, worker.now)
    worker.go(tier)
    worker.settle(tier)

    assert worker.take().ids == truth
    assert worker.counters["l2_timeouts"] == (spoil in {"lost", "late"})
    assert worker.counters["l2_late"] == (spoil != "lost")
    assert_slots_free(worker)


@pytest.mark.parametrize(
    ("num_blocks", "num_loaded"), [(40, 33), (1, 2), (41, 1), (-1, -1), (1 << 40, 1 << 40)]
)
def test_an_answer_that_cannot_be_true_is_a_miss(
    tier: Tier, num_blocks: int, num_loaded: int
) -> None:
    truth = warm(tier)
    worker = L2Worker(tier)
    worker.run(**asked())
    worker.tick()
    (question,) = worker.questions(tier)
    (answer,) = tier.answer(question)
    changes = {"num_blocks": num_blocks, "num_loaded": num_loaded}
    worker.core.receive(msgspec.structs.replace(answer, **changes), worker.now)
    worker.go(tier)
    worker.settle(tier)

    assert worker.take().ids == truth
    assert worker.counters["l2_rejected"] == 1
    assert worker.counters["l2_hit_tokens"] == 0
    assert_slots_free(worker)


def test_blocks_of_an_answer_without_its_slots_are_not_read(tier: Tier) -> None:
    """What says that it loaded, and still holds the slots, may still be writing."""
    truth = warm(tier)
    worker = L2Worker(tier)
    worker.run(**asked())
    worker.tick()
    (question,) = worker.questions(tier)
    assert isinstance(question, LookupBlocks)
    answer = BlocksFound(lookup_id=question.lookup_id, kv_tier="kv-1", num_blocks=40, num_loaded=8)
    worker.core.receive(answer, worker.now)
    worker.go(tier)

    assert worker.take().ids == truth
    assert worker.counters["l2_rejected"] == 1
    worker.settle(tier)  # it is asked for them, and gives them back
    assert_slots_free(worker)


def test_slots_of_a_dead_tier_come_back_and_those_of_a_paused_one_do_not(tier: Tier) -> None:
    """Only the end of its process proves that nobody writes there any more."""
    with subprocess.Popen(["sleep", "60"]) as child:
        worker = L2Worker(Tier("kv-9", child.pid))
        worker.run(**asked())
        worker.tick()
        worker.tick(0.3)
        worker.tick(5.0)
        lent = worker.slots_away
        child.kill()
    worker.tick(0.1)

    assert lent > 0
    assert worker.slots_away == 0
    worker.go(tier)
    assert worker.take().ids == warm(tier)


def test_a_tier_that_does_not_answer_is_left_alone_for_a_while(tier: Tier) -> None:
    """Two timeouts open the breaker: the next leg does not wait."""
    worker = L2Worker(tier)
    for choice in range(2):
        worker.run(choice=choice, **asked(salt=bytes([choice])))
        worker.tick()
        worker.hear(tier)
        worker.tick(0.3)
    worker.take()
    worker.run(choice=2, **asked(salt=b"2"))
    worker.tick()

    assert worker.counters["l2_timeouts"] == 2
    assert [started.choice for started in worker.take().started] == [2]
    assert worker.core.step(worker.now)


def beats(tier: Tier) -> dict[str, Callable[[L2Worker], None]]:
    return {
        "silent": lambda worker: worker.tick(1.1),
        "draining": lambda worker: worker.hear(tier, draining=True),
        "not ready": lambda worker: worker.hear(tier, ready=False),
        "cut off": lambda worker: worker.core.connection_lost(worker.now),
    }


@pytest.mark.parametrize("why", [*beats(Tier())])
def test_who_cannot_answer_is_not_asked(tier: Tier, why: str) -> None:
    """A leg does not wait for a tier that is known to be away."""
    worker = L2Worker(tier)
    beats(tier)[why](worker)
    worker.run(**asked())
    worker.tick()
    assert worker.questions(tier) == []
    assert worker.core.step(worker.now)


def test_a_tier_of_another_host_is_not_asked(tier: Tier) -> None:
    """Nor one that has ended already. Without any the leg begins at once."""
    worker = L2Worker(None)
    worker.hear(tier, host="elsewhere/pid:[1]")
    with subprocess.Popen(["true"]) as child:
        child.wait()
        worker.hear(tier, pid=child.pid)
    worker.run(**asked())
    assert worker.core.step(worker.now)
    assert worker.questions(tier) == []


def test_the_newest_tier_is_asked(tier: Tier) -> None:
    """And the other again when that one is silent."""
    newer = Tier("kv-2")
    worker = L2Worker(tier)
    worker.hear(newer)
    worker.hear(tier)
    worker.run(**asked())
    worker.tick()
    assert (len(worker.questions(newer)), len(worker.questions(tier))) == (1, 0)
    worker.tick(1.1)
    worker.hear(tier)
    worker.run(choice=1, **asked(salt=b"other"))
    worker.tick()
    assert len([q for q in worker.questions(tier) if isinstance(q, LookupBlocks)]) == 1


def test_a_leg_that_is_cancelled_while_it_waits_leaves_nothing(tier: Tier) -> None:
    """Its answer finds nobody, its slots come back; one that waited for its blocks asks itself."""
    truth = warm(tier)
    worker = L2Worker(tier)
    worker.run(**asked())
    worker.run(choice=1, **asked())
    worker.tick()
    worker.core.receive(Cancel(request_id="r", choice=0, epoch=1), worker.now)
    worker.go(tier)
    worker.settle(tier)

    sent = worker.take()
    assert sent.ids == truth
    assert [started.choice for started in sent.started] == [1]
    assert_slots_free(worker)
    worker.assert_empty()


def test_loads_take_no_block_that_running_legs_need(tier: Tier) -> None:
    """In a pool that is nearly full nobody is preempted for a load, and the ids are the same."""
    truth = warm(tier)
    sim = msgspec.structs.replace(SIM, num_blocks=44)
    worker = L2Worker(tier, sim)
    other = SamplingParams(max_tokens=100, seed=1)
    worker.run(choice=1, prompt_ids=pack_ids(range(20 * BLOCK_SIZE)), sampling=other)
    worker.go(tier, steps=5)
    worker.run(**asked())
    worker.go(tier)

    sent = worker.take()
    ids = [i for record in sent.records if record.choice == 0 for i in unpack_ids(record.ids)]
    assert ids == truth
    assert worker.counters["preemptions"] == 0
    worker.assert_empty()


def assert_slots_free(worker: L2Worker) -> None:
    worker.tick(1.0)
    assert worker.slots_away == 0
