"""The scheduler's half of the protocol: one epoch, one placement, and a straight answer."""

import pytest

from shared.ids import pack_ids
from shared.messages import (
    Accepted,
    Beacon,
    Cancel,
    Died,
    Ended,
    EndedLeg,
    Failed,
    Lost,
    NotLeader,
    RouteLost,
    Run,
    ToScheduler,
)
from shared.sampling import SamplingParams
from tests.services.scheduler.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig().lead("w0", "w1", "d0")


def test_a_leg_is_accepted_and_placed_at_once(rig: Rig) -> None:
    """No tick stands between a Submit and its Run when somebody has room."""
    rig.submit()
    [(gateway, accepted), (worker, run)] = rig.sent()
    assert (gateway, type(accepted), accepted.term) == ("g", Accepted, 1)
    assert (worker, type(run), run.detokenizer, run.term) == ("w0", Run, "d0", 1)
    assert rig.renew() == [("placed", "w0")]


def test_a_duplicate_is_accepted_again_and_placed_once(rig: Rig) -> None:
    """The bus may say a thing twice, also after the leg has ended."""
    rig.submit()
    rig.submit()
    assert [type(m) for _, m in rig.sent()] == [Accepted, Run, Accepted]
    rig.say(Ended(worker="w0", legs=[EndedLeg("r", 0, 1, "stop", 5)]))
    rig.submit()
    assert rig.sent() == []
    assert len(rig.core.entries) == 0


def test_a_standby_takes_nothing() -> None:
    """It says who leads, and never queues what it cannot place."""
    standby = Rig()
    standby.say(Beacon(scheduler="l", term=4, pool="p"))
    standby.submit()
    [(_, answer)] = standby.sent(NotLeader)
    assert (answer.leader, answer.term) == ("l", 4)
    assert standby.renew() == [("unknown", "")]


def test_a_higher_epoch_takes_over_the_place_of_a_queued_leg() -> None:
    """A re-sent Submit does not go to the end of the queue, and a lower one changes nothing."""
    rig = Rig().lead("d0")
    rig.submit("first")
    rig.submit("second")
    rig.submit("first", epoch=2)
    rig.submit("first", epoch=1)
    assert rig.core.num_queued == 2
    rig.sent()
    rig.beat("w0")
    assert [m.submit.request_id for _, m in rig.sent(Run)] == ["first", "second"]


def test_a_redrive_goes_back_to_its_last_worker_without_credit(rig: Rig) -> None:
    """It may still be running there; only a dead, hung or draining worker is avoided."""
    rig.beat("w1", load=4, prefill_tokens_waiting=1000)
    rig.submit(epoch=2, last_worker="w1")
    assert [worker for worker, _ in rig.sent(Run)] == ["w1"]
    rig.beat("w1", draining=True)
    rig.submit(epoch=3, last_worker="w1")
    assert [worker for worker, _ in rig.sent(Run)] == ["w0"]


def test_a_cancel_reaches_the_worker_and_outlives_late_submits(rig: Rig) -> None:
    """Also one that overtakes its Submit."""
    rig.submit()
    rig.sent()
    rig.say(Cancel(request_id="r", choice=0, epoch=1))
    assert [worker for worker, _ in rig.sent(Cancel)] == ["w0"]
    rig.say(Cancel(request_id="early", choice=0, epoch=3))
    rig.submit("early", epoch=3)
    assert rig.sent() == []
    rig.submit("early", epoch=4)
    assert len(rig.sent(Run)) == 1


def test_a_leg_goes_on_elsewhere_after_it_failed(rig: Rig) -> None:
    """The place that it had does not draw it back, also if its end there is not known yet."""
    rig.submit()
    assert [worker for worker, _ in rig.sent(Run)] == ["w0"]
    rig.submit(epoch=2, failed_worker="w0")
    assert [worker for worker, _ in rig.sent(Run)] == ["w1"]


@pytest.mark.parametrize("instance", ["w0", "d0"])
def test_a_death_is_told_to_all_gateways_and_each_placed_leg(rig: Rig, instance: str) -> None:
    """`Lost` moves what runs, `RouteLost` what no gateway knows to be there."""
    rig.submit()
    rig.sent()
    rig.say(Died(instance=instance, reason="killed"))
    [(everybody, lost)] = rig.sent(Lost)
    assert (everybody, lost.instance, lost.hung) == ("gateway", instance, False)
    rig.submit("r2")
    rig.say(Died(instance=instance, reason="killed"))
    assert rig.sent(Lost) == []


def test_a_beacon_tells_of_the_model_what_workers_tell(rig: Rig) -> None:
    """Also when no worker is ready any more."""
    for name in ("w0", "w1"):
        rig.beat(name, model="m", max_model_len=300, kv_policy="window=64")
    rig.sent()
    for name in ("w0", "w1"):
        rig.pass_time(0.3)
        beacon = rig.sent(Beacon)[-1][1]
        told = (beacon.model, beacon.max_model_len, beacon.kv_policy)
        assert told == ("m", 300, "window=64")
        rig.alive.pop(name)


def test_a_leg_placed_at_a_lost_worker_loses_its_route(rig: Rig) -> None:
    """The reason tells the session whether it was a death: silence is none."""
    rig.submit()
    rig.sent()
    rig.alive.pop("w0")
    rig.pass_time(1.2)
    [(gateway, lost)] = rig.sent(RouteLost)
    assert (gateway, lost.epoch, lost.reason) == ("g", 1, "worker_hung")
    assert rig.core.num_workers == 1
    rig.submit(epoch=2)
    rig.say(Died(instance="w1", reason="killed"))
    [(_, lost)] = rig.sent(RouteLost)
    assert (lost.epoch, lost.reason) == (2, "worker_lost")


def test_a_hung_worker_is_lost_and_gets_nothing(rig: Rig) -> None:
    """Its step counter stands still beyond the bound it declared."""
    rig.submit()
    rig.beat("w0", step=1, phase_age_ms=2000, phase_bound_ms=1000)
    rig.sent()
    rig.pass_time(0.05)
    assert [(m.instance, m.hung) for _, m in rig.sent(Lost)] == [("w0", True)]
    rig.submit(epoch=2, last_worker="w0")
    assert [worker for worker, _ in rig.sent(Run)] == ["w1"]


def test_credit_keeps_the_rest_of_a_burst_here() -> None:
    """A worker holds two steps of prefill; what waits behind it stays movable."""
    rig = Rig().lead("w0", "d0")
    for number in range(12):
        rig.submit(f"r{number}", prompt_ids=pack_ids(range(60)))
    assert len(rig.sent(Run)) == 3
    assert rig.core.num_queued == 9
    assert rig.renew("r11") == [("queued", "")]


def test_the_queue_is_bounded_and_never_sheds_a_redrive() -> None:
    """New work is told when to come back; a stream in mid-sentence is not new work."""
    rig = Rig(queued_legs_max=2).lead("d0")
    for name in ("a", "b", "c"):
        rig.submit(name)
    [(_, failed)] = rig.sent(Failed)
    assert (failed.request_id, failed.code, failed.retryable) == ("c", "overloaded", False)
    assert failed.retry_after_s >= 1.0
    rig.submit("d", epoch=2, output_ids=pack_ids([1]))
    assert rig.core.num_queued == 3


def test_what_can_never_fit_is_refused_at_once(rig: Rig) -> None:
    """It would wait for room that no worker has."""
    rig.submit(sampling=SamplingParams(max_tokens=300))
    [(_, failed)] = rig.sent()
    assert failed.code == "context_length_exceeded"


def test_a_redrive_too_long_for_who_is_left_waits_and_holds_up_nobody(rig: Rig) -> None:
    """Its own worker may come back; a stream in mid-sentence is not told that it never fitted."""
    rig.submit("long", epoch=2, sampling=SamplingParams(max_tokens=300))
    rig.submit("short")
    assert [m.submit.request_id for _, m in rig.sent(Run)] == ["short"]
    rig.beat("w2", max_model_len=512)
    assert [(to, m.submit.request_id) for to, m in rig.sent(Run)] == [("w2", "long")]


def test_a_pool_without_workers_waits_a_while_and_then_says_so() -> None:
    """A restart of the only worker is waited for; a pool that stays empty is unavailable."""
    rig = Rig(no_worker_s=3.0).lead("d0")
    rig.submit()
    rig.pass_time(1.5)
    assert rig.sent(Failed) == []
    rig.pass_time(2.0)
    assert [m.code for _, m in rig.sent(Failed)] == ["unavailable"]
    rig.submit("later")
    assert [m.code for _, m in rig.sent(Failed)] == ["unavailable"]


def test_a_leg_that_nobody_renews_is_forgotten(rig: Rig) -> None:
    """Five seconds; a renewal is all it takes to stay."""
    waiting = Rig().lead("d0")
    waiting.submit()
    waiting.pass_time(4.0)
    assert waiting.renew() == [("queued", "")]
    waiting.pass_time(4.0)
    assert waiting.renew() == [("queued", "")]
    waiting.pass_time(5.2)
    assert waiting.renew() == [("unknown", "")]
    assert waiting.core.num_queued == 0


def test_a_deposed_leader_keeps_nothing_and_says_unknown() -> None:
    """Its queue is submitted to the new leader by the sessions."""
    rig = Rig().lead("d0")
    rig.submit()
    rig.say(Beacon(scheduler="z", term=2, pool="p"))
    assert not rig.core.is_leader
    assert rig.core.num_queued == 0
    assert rig.renew() == [("unknown", "")]


def test_a_leader_that_resigns_says_so_keeps_nothing_and_takes_nothing() -> None:
    """Its last beacon is its farewell; what waited is submitted to the next one."""
    rig = Rig().lead("d0")
    rig.submit()
    rig.sent()
    rig.core.resign(rig.now)
    [(_, farewell)] = rig.sent()
    assert (farewell.scheduler, farewell.term, farewell.resigning) == ("s", 1, True)
    assert (rig.core.is_leader, rig.core.num_queued) == (False, 0)
    rig.submit("other")
    assert [type(message) for _, message in rig.sent()] == [NotLeader]
    rig.core.resign(rig.now)
    rig.pass_time(3.0)
    assert rig.sent() == []


@pytest.mark.parametrize(
    "news",
    [
        Died(instance="l", reason="killed"),
        Beacon(scheduler="l", term=1, pool="p", resigning=True),
    ],
)
def test_a_standby_leads_as_soon_as_it_knows_that_the_leader_is_gone(news: ToScheduler) -> None:
    """At its next tick, above the leader's term, not after a second of silence."""
    standby = Rig()
    standby.say(Beacon(scheduler="l", term=1, pool="p"))
    standby.say(Died(instance="x", reason="killed"))
    standby.pass_time(0.05)
    assert not standby.core.is_leader
    standby.say(news)
    standby.pass_time(0.05)
    assert (standby.core.is_leader, standby.core.term) == (True, 2)


def test_a_new_leader_repeats_losses_and_says_unknown_to_nobody_at_first() -> None:
    """The last one may have died before it could say them; legs are on their way to this one."""
    rig = Rig()
    rig.say(Beacon(scheduler="l", term=1, pool="p"))
    rig.beat("w0")
    rig.say(Died(instance="w0", reason="killed"))
    rig.alive.clear()
    rig.pass_time(1.1)
    assert [(m.instance, m.term) for _, m in rig.sent(Lost)] == [("w0", 2)]
    assert rig.renew() == []
    rig.pass_time(1.0)
    assert rig.renew() == [("unknown", "")]


def test_beacons_say_what_gateways_must_know(rig: Rig) -> None:
    """Ready workers and the longest context; the latter is remembered through a restart."""
    rig.pass_time(0.3)
    shown = rig.sent(Beacon)[-1][1]
    assert (shown.workers, shown.max_model_len, shown.term) == (2, 256, 1)
    rig.alive = {"d0": rig.alive["d0"]}
    rig.pass_time(1.5)
    shown = rig.sent(Beacon)[-1][1]
    assert (shown.workers, shown.max_model_len) == (0, 256)


def test_a_scheduler_that_slept_declares_nobody_dead(rig: Rig) -> None:
    """Sixty seconds of silence were its own."""
    rig.now += 60.0
    rig.core.tick(rig.now)
    assert rig.sent(Lost) == []
    assert rig.core.num_workers == 2
