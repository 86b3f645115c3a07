"""When a leg is driven again, and when not."""

from typing import Any

import pytest

from services.gateway.sessions import Limits
from shared.errors import Code
from shared.ids import pack_ids
from shared.messages import (
    Accepted,
    Beat,
    Cancel,
    Failed,
    Lost,
    NotLeader,
    Renew,
    Renewed,
    RenewedLeg,
    RouteLost,
    Started,
    Submit,
    Tokenized,
    TokenizedPrompt,
)
from tests.services.gateway.session_rig import R, Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_lack_of_accepted_is_sent_again_under_a_fresh_epoch(rig: Rig) -> None:
    """300 ms, then doubling to a second; bounded by the deadline alone."""
    rig.open()
    rig.tokenize()
    rig.pass_time(6.0)
    epochs = [submit.epoch for _, submit in rig.sent(Submit)]
    assert epochs == list(range(1, len(epochs) + 1))
    assert 6 <= len(epochs) <= 9
    rig.say(Accepted(request_id=R, choice=0, epoch=epochs[-1], scheduler="s", term=1))
    rig.pass_time(0.9)
    assert rig.sent(Submit) == []


def test_a_submit_is_not_sent_again_while_nothing_is_heard(rig: Rig) -> None:
    """The bus holds up the Submit, its answer and everything else; a re-drive would add to it."""
    rig.open()
    rig.tokenize()
    rig.pass_time(0.1)
    rig.sent()
    rig.pass_time(2.0, beating=())
    assert len(rig.sent(Submit)) == 1, "sent again before the silence was noticed"
    rig.pass_time(0.9)
    assert rig.sent(Submit) == [], "the answer has no time to come"
    rig.pass_time(0.2)
    assert len(rig.sent(Submit)) == 1


def test_not_leader_waits_for_a_beacon(rig: Rig) -> None:
    """A new leader's beacon takes unanswered and queued legs to it at once."""
    rig.open()
    rig.tokenize()
    rig.sent()
    rig.say(NotLeader(request_id=R, choice=0, epoch=1, scheduler="s", term=2, leader="s2"))
    rig.say(rig.beacon("s2", 2))
    rig.pass_time(0.1)
    assert [(to, submit.epoch) for to, submit in rig.sent(Submit)] == [("s2", 2)]
    rig.say(Accepted(request_id=R, choice=0, epoch=2, scheduler="s2", term=2))
    rig.say(rig.beacon("s", 1))
    assert rig.table.leading.instance == "s2"


def test_a_running_leg_does_not_care_who_leads(rig: Rig) -> None:
    """A change of leader costs a running stream nothing."""
    rig.running()
    rig.say(rig.beacon("s2", 2))
    rig.pass_time(0.3)
    assert rig.sent(Submit) == []


@pytest.mark.parametrize("instance", ["w0", "d0"])
def test_the_loss_of_worker_or_detokenizer_moves_its_legs(rig: Rig, instance: str) -> None:
    """One `Lost` is enough, and it moves nobody else's."""
    rig.running()
    rig.say(Lost(instance="w9", scheduler="s", term=1))
    rig.say(Lost(instance=instance, scheduler="s", term=0))
    rig.pass_time(0.2)
    assert rig.sent(Submit) == []
    rig.say(Lost(instance=instance, scheduler="s", term=1))
    assert rig.resubmitted().epoch == 2


def test_a_worker_that_knows_nothing_of_the_leg_loses_it(rig: Rig) -> None:
    """The question that finds a lost `Run`: `placed` names whom to ask, and that one answers."""
    rig.open()
    rig.tokenize()
    rig.say(Accepted(request_id=R, choice=0, epoch=1, scheduler="s", term=1))
    rig.pass_time(1.2)
    assert [to for to, _ in rig.sent(Renew)] == ["s"]
    placed = RenewedLeg(R, 0, 1, "placed", worker="w3", detokenizer="d3")
    rig.say(Renewed(holder="s", legs=[placed]))
    rig.pass_time(1.2)
    assert [to for to, _ in rig.sent(Renew)] == ["w3"]
    rig.say(Renewed(holder="s", legs=[RenewedLeg(R, 0, 1, "unknown")]))  # asked no more
    rig.pass_time(0.1)
    assert rig.sent(Submit) == []
    rig.say(Renewed(holder="w3", legs=[RenewedLeg(R, 0, 1, "unknown")]))
    assert rig.resubmitted().last_worker == "w3"


def test_a_tail_is_lost_when_two_answers_claim_it_and_nothing_comes(rig: Rig) -> None:
    """One answer may have overtaken the ids; a second one a renewal later has not."""
    rig.running()
    claim = Renewed(holder="w0", legs=[RenewedLeg(R, 0, 1, "decode", sent=3)])
    rig.say(claim)
    rig.say(claim)  # a duplicate on the bus is no second answer
    rig.pass_time(0.2)
    assert rig.sent(Submit) == []
    rig.pass_time(0.8)
    rig.say(claim)
    assert rig.resubmitted().output_ids == pack_ids([1, 2])


def test_ids_between_two_answers_are_progress(rig: Rig) -> None:
    """A stream that moves has lost nothing."""
    rig.running()
    rig.say(Renewed(holder="w0", legs=[RenewedLeg(R, 0, 1, "decode", sent=3)]))
    rig.pass_time(1.0)
    rig.text(1, 2, [3])
    rig.say(Renewed(holder="w0", legs=[RenewedLeg(R, 0, 1, "decode", sent=4)]))
    rig.pass_time(0.2)
    assert rig.sent(Submit) == []


def test_three_unanswered_renewals_are_enough(rig: Rig) -> None:
    """About three seconds; waiting is never a fault while the holder answers."""
    rig.running()
    for _ in range(6):
        rig.pass_time(1.0)
        rig.say(Renewed(holder="w0", legs=[RenewedLeg(R, 0, 1, "prefill", sent=2)]))
    assert rig.sent(Submit) == []
    rig.pass_time(2.0)
    assert rig.sent(Submit) == []
    rig.pass_time(2.5)
    assert rig.table.redrives["unanswered"] == 1


def test_a_worker_in_one_long_step_is_not_silent(rig: Rig) -> None:
    """It reads between two steps; what it was asked in a step it cannot have answered. A worker
    that goes on from step to step, or does nothing, could have.
    """

    def beats(seconds: float, step: int, step_s: float, phase: str = "prefill") -> int:
        for _ in range(round(seconds * 10)):
            step += rig.now % step_s < 0.1
            beat = Beat(instance="w0", role="gpu_worker", seq=1, step=step, phase=phase)
            rig.say(beat)
            rig.pass_time(0.1)
        return step

    rig.running()
    step = beats(20.0, step=7, step_s=100.0)
    assert len(rig.sent(Renew)) > 10
    assert rig.table.redrives == {}
    beats(8.0, step, step_s=0.3)
    assert rig.table.redrives["unanswered"] == 1


def test_an_idle_worker_that_does_not_answer_is_given_up(rig: Rig) -> None:
    """Its `Run` was lost, and it has nothing else to do."""
    rig.running()
    for _ in range(50):
        rig.say(Beat(instance="w0", role="gpu_worker", seq=1, step=7, phase="idle"))
        rig.pass_time(0.1)
    assert rig.table.redrives["unanswered"] == 1


def test_quick_renewals_after_a_reconnect_are_not_counted(rig: Rig) -> None:
    """Every 250 ms for 1.5 s, so that a lost tail is found soon and nobody is given up."""
    rig.running()
    rig.table.connection_lost(rig.now)
    rig.pass_time(2.0)
    assert rig.sent() == []
    rig.table.reconnected(rig.now)
    rig.pass_time(1.5)
    assert 5 <= len(rig.sent(Renew)) <= 8
    assert rig.table.redrives == {}


def test_a_table_that_slept_counts_no_silence(rig: Rig) -> None:
    """Questions that were open when the process was stopped prove nothing."""
    rig.running()
    rig.pass_time(2.3)
    rig.now += 60.0
    rig.table.tick(rig.now)
    rig.pass_time(1.5)
    assert rig.table.redrives == {}


def test_attempts_end_after_four_hangs_in_a_row(rig: Rig) -> None:
    """A fifth hang without a new id between ends the request; progress forgives all before."""
    rig.running()
    for epoch in range(2, 6):
        rig.say(Lost(instance="d0", scheduler="s", term=1, hung=True))
        assert rig.resubmitted().epoch == epoch
        rig.start(epoch)
    rig.say(Lost(instance="d0", scheduler="s", term=1, hung=True))
    assert rig.error_code() == "unavailable"


def test_a_leg_that_fells_whoever_takes_it_ends(rig: Rig) -> None:
    """An `internal` failure is an attempt even before the start: schedulers die of it, too."""
    rig.open()
    rig.tokenize()
    rig.sent()
    for epoch in range(1, 6):
        failed = Failed(
            request_id=R, choice=0, epoch=epoch, code="internal", detail="fell", retryable=True
        )
        rig.say(failed)
        assert epoch == 5 or rig.resubmitted().epoch == epoch + 1
    assert rig.error_code() == "internal"


@pytest.mark.parametrize(("code", "runs"), [("internal", 3), ("unavailable", 5)])
def test_a_leg_on_which_the_model_fails_is_tried_elsewhere(rig: Rig, code: Code, runs: int) -> None:
    """Twice, since what is wrong with it most likely goes along; a lack of memory does not."""
    rig.running()
    failure: Any = {"choice": 0, "code": code, "detail": "NaN", "retryable": True, "started": True}
    for epoch in range(1, runs):
        rig.say(Failed(request_id=R, epoch=epoch, **failure))
        again = rig.resubmitted()
        assert (again.epoch, again.last_worker) == (epoch + 1, "")
        assert again.failed_worker == f"w{epoch - 1}"
        rig.start(epoch + 1, f"w{epoch}")
    rig.say(Failed(request_id=R, epoch=runs, **failure))
    assert rig.error_code() == code


def test_a_new_id_forgives_the_attempts_before(rig: Rig) -> None:
    """Ten deaths with an id between each are ten first attempts."""
    rig.running()
    for epoch in range(2, 8):
        rig.say(Lost(instance="w0", scheduler="s", term=1))
        assert rig.resubmitted().epoch == epoch
        rig.start(epoch)
        rig.text(epoch, epoch, [epoch])
    assert rig.ids() == [1, 2, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("dies", ["w0", "d0"])
def test_a_poisonous_request_runs_alone_once_and_then_ends(rig: Rig, dies: str) -> None:
    """Two workers or detokenizers died of it; the third time it takes nobody along."""
    rig.running()
    alone = []
    for epoch in (2, 3):
        rig.say(Lost(instance=dies, scheduler="s", term=1))
        alone.append(rig.resubmitted().alone)
        rig.start(epoch)
    assert alone == [False, True]
    rig.say(Lost(instance=dies, scheduler="s", term=1))
    assert rig.error_code() == "internal"


def test_fruitless_redrives_wait_longer_each_time(rig: Rig) -> None:
    """50 ms from the second on, doubling to a second: a broken path is not hammered."""
    rig.running()
    for epoch in range(1, 8):
        rig.say(RouteLost(request_id=R, choice=0, epoch=epoch, reason="gap"))
        waited = 0.0
        while not rig.sent(Submit):
            rig.pass_time(0.05)
            waited += 0.05
        expected = 0.0 if epoch == 1 else min(0.05 * 2 ** (epoch - 2), 1.0)
        assert expected - 0.01 <= waited <= expected + 0.16
        rig.start(epoch + 1)
        rig.sent()


def test_a_retryable_failure_goes_on_and_any_other_ends_all_choices(rig: Rig) -> None:
    """`retryable` decides; the other choices of a failed request are cancelled."""
    rig.open(n=2)
    rig.tokenize()
    rig.start(choice=0)
    rig.start(choice=1)
    rig.sent()
    failure: dict[str, Any] = {"request_id": R, "epoch": 1, "code": "internal", "detail": "nan"}
    rig.say(Failed(choice=0, retryable=True, started=True, **failure))
    assert rig.resubmitted().choice == 0
    rig.say(Failed(choice=1, **failure))
    assert rig.error_code() == "internal"
    assert {(to, c.choice, c.epoch) for to, c in rig.sent(Cancel)} >= {("w0", 1, 1), ("s", 0, 2)}


def test_a_leg_that_moved_frees_its_former_worker(rig: Rig) -> None:
    """What may still run under the old epoch is cancelled as soon as the new one has started."""
    rig.running()
    rig.say(RouteLost(request_id=R, choice=0, epoch=1, reason="drain"))
    rig.resubmitted()
    rig.start(2, worker="w1")
    [(to, cancel)] = rig.sent(Cancel)
    assert (to, cancel.epoch) == ("w0", 1)


def test_redrives_are_paced_highest_class_first() -> None:
    """A lost worker with many legs does not become a flood, and the urgent go first."""
    rig = Rig(Limits(redrives_per_s=100.0))
    for number in range(40):
        request_id = f"{number:032x}"
        rig.open(request_id=request_id, priority=number % 2)
        rig.say(
            Tokenized(
                request_id=request_id,
                attempt=1,
                tokenizer="t0",
                prompts=[TokenizedPrompt(pack_ids([7, 8]))],
            )
        )
        rig.say(Started(request_id=request_id, choice=0, epoch=1, worker="w0", detokenizer="d0"))
    rig.sent()
    rig.pass_time(0.1)
    rig.say(Lost(instance="w0", scheduler="s", term=1))
    rig.now += 0.06
    rig.table.tick(rig.now)
    first = [submit for _, submit in rig.sent(Submit)]
    assert len(first) <= 10
    assert {submit.priority for submit in first} == {0}
    rig.pass_time(0.25)
    then = [submit for _, submit in rig.sent(Submit) if submit.epoch == 2]
    assert 20 <= len(then) <= 30
