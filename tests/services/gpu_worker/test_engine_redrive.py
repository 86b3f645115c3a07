"""A leg that comes again: adopted or made anew, it goes on with the same ids."""

import msgspec
import pytest

from services.detokenizer.legs import DetokenizerLegs
from shared.ids import pack_ids, unpack_ids
from shared.messages import (
    Beacon,
    Cancel,
    StepDone,
    TextDelta,
    encode,
)
from shared.sampling import SamplingParams
from shared.subjects import inbox
from shared.testing import MAX_PAYLOAD
from shared.vocabulary import Vocabulary
from tests.services.gpu_worker.engine_kit import PROMPT, SIM, Worker, truth


@pytest.mark.parametrize("delivered", range(12))
def test_a_re_drive_elsewhere_makes_the_ids_that_were_missing(delivered: int) -> None:
    """Output ids that came with the leg are prefill; sampling goes on at the next position."""
    ids = truth()
    worker = Worker()
    worker.run(epoch=5, output_ids=ids[:delivered])
    worker.steps()
    sent = worker.take()

    assert sent.records[0].index == delivered
    assert sent.records[0].context is not None
    assert unpack_ids(sent.records[0].context.output_ids) == ids[:delivered]
    assert sent.ids == ids[delivered:]


def test_adopting_a_running_leg_sends_again_and_goes_on() -> None:
    """A higher epoch of the same ids takes the leg over: new detokenizer, no prefill."""
    ids = truth()
    worker = Worker()
    worker.run()
    worker.steps(6)
    worker.take()
    worker.run(epoch=2, output_ids=ids[:2], detokenizer="d-2", scheduler="s-2")
    (again,) = worker.core.outbox.take()[1:]
    assert isinstance(again.message, StepDone)
    (record,) = again.message.records
    worker.steps()
    sent = worker.take()

    assert again.subject == inbox("d-2")
    assert (record.epoch, record.index) == (2, 2)
    assert record.context is not None
    assert unpack_ids(record.context.output_ids) == ids[:2]
    assert unpack_ids(record.ids) + sent.ids == ids[2:]
    assert {r.epoch for r in sent.records} == {2}
    assert sent.ended == [(inbox("s-2"), 2, "length")]
    assert worker.core.counters["legs_taken"] == 1
    worker.assert_empty()


def test_adopting_sends_the_logprobs_again() -> None:
    """What is sent again is complete."""
    sampling = SamplingParams(max_tokens=12, seed=7, logprobs=1)
    worker = Worker()
    worker.run(sampling=sampling)
    worker.steps(6)
    first = worker.take()
    worker.run(epoch=2, sampling=sampling, output_ids=first.ids[:2])
    again = worker.take()

    assert again.records[0].logprobs == [lp for r in first.records[2:] for lp in r.logprobs or []]


def test_a_long_answer_with_logprobs_is_sent_again_in_parts_that_the_bus_takes() -> None:
    """Nothing of it has arrived; in one piece it would be refused at every re-drive. The reader has
    its context once, its end last, and all of it in order.
    """
    sampling = SamplingParams(max_tokens=3000, seed=7, logprobs=20)
    worker = Worker(msgspec.structs.replace(SIM, num_blocks=200, max_model_len=3200))
    worker.run(sampling=sampling)
    while worker.core.step(worker.now):
        pass
    ids = worker.take().ids
    worker.run(epoch=2, sampling=sampling)
    reader = DetokenizerLegs("d-1", Vocabulary([b"%070d" % i for i in range(1000)]))
    records = []
    for envelope in worker.core.outbox.take():
        if isinstance(envelope.message, StepDone):
            assert len(encode(envelope.message)) < MAX_PAYLOAD / 4
            records += envelope.message.records
            reader.receive(envelope.message, worker.now)
    deltas = [envelope.message for envelope in reader.outbox.take()]

    assert sum(len(encode(delta)) for delta in deltas) > MAX_PAYLOAD
    assert all(len(encode(delta)) < MAX_PAYLOAD / 4 for delta in deltas)
    assert [record.context is not None for record in records] == [True] + [False] * 11
    texts = [text for delta in deltas if isinstance(delta, TextDelta) for text in delta.records]
    assert [i for text in texts for i in unpack_ids(text.ids)] == ids
    assert [len(text.logprobs or []) for text in texts] == [256] * 11 + [184]
    assert [text.finish_reason for text in texts] == [""] * 11 + ["length"]


def test_logprobs_that_the_worker_never_had_are_computed_anew() -> None:
    """A re-drive from before the ids that the leg came with cannot be adopted."""
    sampling = SamplingParams(max_tokens=12, seed=7, logprobs=1)
    ids = truth(sampling=sampling)
    worker = Worker()
    worker.run(sampling=sampling, output_ids=ids[:5])
    worker.steps(3)
    worker.take()
    worker.run(epoch=2, sampling=sampling, output_ids=ids[:2])
    worker.steps()
    sent = worker.take()

    assert [s.adopted for s in sent.started] == [False]
    assert sent.ids == ids[2:]
    assert [len(record.logprobs or []) for record in sent.records] == [1] * 10


def test_a_leg_that_just_finished_is_adopted() -> None:
    """The lost tail of a finished leg is sent again with its end, and nothing is computed."""
    ids = truth()
    worker = Worker()
    worker.run()
    worker.steps()
    worker.take()
    worker.now += 9
    worker.run(epoch=2, output_ids=ids[:9])
    sent = worker.take()

    assert [s.adopted for s in sent.started] == [True]
    assert [(r.index, unpack_ids(r.ids), r.end) for r in sent.records] == [(9, ids[9:], "length")]
    assert sent.ended == [(inbox("s-1"), 2, "length")]
    assert worker.renew(2).state == "done"
    worker.run(epoch=2, output_ids=ids[:9])
    assert worker.take().started == [], "a duplicate of the adopting run is ignored"
    assert worker.steps() == 0


def test_a_leg_that_finished_long_ago_is_taken_anew() -> None:
    """After 10 s the worker has forgotten the ids; it computes them again, the same."""
    ids = truth()
    worker = Worker()
    worker.run()
    worker.steps()
    worker.take()
    worker.now += 11
    worker.run(epoch=2, output_ids=ids[:9])
    worker.steps()
    sent = worker.take()

    assert [s.adopted for s in sent.started] == [False]
    assert sent.ids == ids[9:]


def test_a_finished_leg_has_nothing_for_a_re_drive_that_has_it_all() -> None:
    """Such a re-drive is answered, not adopted in silence."""
    worker = Worker()
    worker.run()
    worker.steps()
    ids = worker.take().ids
    worker.run(epoch=2, output_ids=ids)
    sent = worker.take()

    assert sent.started == []
    assert [failed.param for failed in sent.failed] == ["max_tokens"]


def test_other_ids_are_not_adopted() -> None:
    """A re-drive that delivered other ids than these supersedes the leg and starts anew."""
    ids = truth()
    worker = Worker()
    worker.run()
    worker.steps(6)
    worker.take()
    worker.run(epoch=2, output_ids=[ids[0] + 1])
    sent = worker.take()

    assert [s.adopted for s in sent.started] == [False]
    assert sent.ended == [(inbox("s-1"), 1, "moved")]
    worker.steps()
    assert {r.epoch for r in worker.take().records} == {2}
    worker.assert_empty()


def test_a_preempted_leg_can_be_adopted() -> None:
    """Blocks are not what makes a leg adoptable; its ids are."""
    sim = msgspec.structs.replace(SIM, num_blocks=6)
    sampling = SamplingParams(max_tokens=30, seed=7)
    expected = truth(sampling=sampling)
    worker = Worker(sim)
    worker.run(choice=1, sampling=sampling, salt=b"1" * 32)
    worker.run(choice=0, sampling=sampling, prompt_ids=pack_ids(PROMPT[:20]))
    while worker.core.batcher.num_preemptions == 0:
        assert worker.steps(1)
    ids = [i for r in worker.take().records if r.choice == 0 for i in unpack_ids(r.ids)]
    assert worker.renew(1, choice=0).state == "paused"
    worker.run(2, prompt_ids=pack_ids(PROMPT[:20]), sampling=sampling, output_ids=ids[:1])
    worker.steps()
    records = worker.take().records

    again = [i for r in records if r.choice == 0 for i in unpack_ids(r.ids)]
    other = [i for r in records if r.choice == 1 for i in unpack_ids(r.ids)]
    assert ids[:1] + again == truth(sampling=sampling, prompt_ids=pack_ids(PROMPT[:20]))
    assert other == expected[-len(other) :]
    worker.assert_empty()


def test_a_duplicate_run_is_ignored() -> None:
    """The same epoch twice changes nothing, while it runs and after it ended."""
    worker = Worker()
    worker.run()
    worker.run()
    worker.steps()
    worker.run()
    sent = worker.take()

    assert len(sent.started) == 1
    assert sent.ids == truth()
    assert worker.core.counters["run_stale"] == 2


def test_a_run_of_a_lower_term_is_dropped() -> None:
    """A deposed leader places nothing; the highest term heard is known for the beats."""
    worker = Worker()
    worker.core.receive(Beacon(scheduler="s-2", term=4, pool="default"), worker.now)
    worker.run(term=3)

    assert worker.take().started == []
    assert worker.core.term == 4
    worker.run(term=4)
    assert len(worker.take().started) == 1


def test_cancel_ends_all_epochs_up_to_it_and_leaves_a_tombstone() -> None:
    """The blocks are free at once, and a late `Run` of an ended epoch finds a closed door."""
    worker = Worker()
    worker.run(epoch=3)
    worker.steps(2)
    worker.take()
    worker.core.receive(Cancel(request_id="r", choice=0, epoch=4), worker.now)
    sent = worker.take()

    assert sent.ended == [(inbox("s-1"), 3, "cancelled")]
    worker.assert_empty()
    worker.run(epoch=4)
    assert worker.take().started == []
    worker.run(epoch=5)
    assert len(worker.take().started) == 1


def test_a_cancelled_leg_that_had_finished_is_forgotten() -> None:
    """Nobody will ask for its ids again."""
    worker = Worker()
    worker.run()
    worker.steps()
    worker.core.receive(Cancel(request_id="r", choice=0, epoch=1), worker.now)

    assert worker.renew().state == "unknown"


def test_a_cancel_that_comes_before_its_run_wins() -> None:
    """Reordering does not resurrect a cancelled leg."""
    worker = Worker()
    worker.core.receive(Cancel(request_id="r", choice=0, epoch=1), worker.now)
    worker.run(epoch=1)

    assert worker.take().started == []


def test_an_older_cancel_does_not_lower_the_tombstone() -> None:
    """Cancels that come out of order fence off as much as the highest of them."""
    worker = Worker()
    for epoch in (5, 3):
        worker.core.receive(Cancel(request_id="r", choice=0, epoch=epoch), worker.now)
    worker.run(epoch=4)

    assert worker.take().started == []


def test_a_cancel_of_an_earlier_epoch_does_not_end_a_later_one() -> None:
    """Epochs are told apart."""
    worker = Worker()
    worker.run(epoch=2)
    worker.core.receive(Cancel(request_id="r", choice=0, epoch=1), worker.now)
    worker.steps()

    assert worker.take().ids == truth()


def test_tombstones_are_bounded() -> None:
    """Memory of the past has a limit in number and in time."""
    worker = Worker(tombstones_max=4)
    for choice in range(10):
        worker.core.receive(Cancel(request_id="r", choice=choice, epoch=1), worker.now)
    worker.core.tick(worker.now)
    for choice in range(10):
        worker.run(choice=choice)
    assert [s.choice for s in worker.take().started] == list(range(6))

    worker.now += 61
    worker.core.tick(worker.now)
    worker.run(choice=9)
    assert [s.choice for s in worker.take().started] == [9]


def test_finished_legs_are_bounded() -> None:
    """Only so many finished legs are kept with their ids."""
    worker = Worker(finished_max=2)
    for choice in range(4):
        worker.run(choice=choice)
    worker.steps()

    assert [worker.renew(choice=choice).state for choice in range(4)] == [
        "unknown",
        "unknown",
        "done",
        "done",
    ]
