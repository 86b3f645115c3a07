"""Election need only converge: the highest (term, instance) leads."""

import itertools
import random

from services.scheduler.leadership import BEACON_S, OUTRANKED_S, SILENCE_S, Leadership


def test_a_lone_scheduler_leads_after_the_silence_with_the_next_term() -> None:
    """It waits as long as a standby would, and leads above every term it heard echoed."""
    alone = Leadership("a", 0.0)
    alone.echo(7)
    assert not alone.tick(SILENCE_S - 0.01)
    assert alone.tick(SILENCE_S)
    assert (alone.leading, alone.term, alone.leader) == (True, 8, "a")


def test_a_standby_waits_for_as_long_as_beacons_come() -> None:
    """Each beacon of the leader puts the next election off."""
    standby = Leadership("b", 0.0)
    for beat in range(20):
        assert not standby.beacon(1, "a", beat * BEACON_S)
        assert not standby.tick(beat * BEACON_S)
    assert standby.leader == "a"
    assert standby.tick(19 * BEACON_S + SILENCE_S)
    assert standby.term == 2


def test_beacons_of_a_lower_claim_do_not_hold_an_election_up() -> None:
    """A deposed leader that woke up is not the one that is missed."""
    standby = Leadership("b", 0.0)
    standby.beacon(5, "a", 0.0)
    standby.beacon(4, "z", 0.9)
    assert standby.tick(SILENCE_S)
    assert standby.term == 6


def test_a_leader_steps_down_for_a_higher_claim_only() -> None:
    """Equal terms are told apart by the instance, so two leaders never both stay or both go."""
    leader = Leadership("b", 0.0)
    leader.tick(SILENCE_S)
    assert not leader.beacon(1, "a", 1.1)
    assert leader.leading
    assert leader.beacon(1, "c", 1.2)
    assert not leader.leading
    assert leader.leader == "c"


def test_a_leader_whose_term_is_outranked_by_an_echo_leads_again_above_it() -> None:
    """Workers would drop its orders; it waits two beacons for the other leader to show itself."""
    leader = Leadership("a", 0.0)
    leader.tick(SILENCE_S)
    leader.echo(9)
    assert not leader.tick(1.1)
    assert not leader.tick(1.1 + OUTRANKED_S - 0.01)
    assert leader.tick(1.1 + OUTRANKED_S)
    assert leader.term == 10


def test_a_scheduler_that_slept_counts_the_silence_anew() -> None:
    """The beacons may have come while it was away."""
    standby = Leadership("b", 0.0)
    standby.beacon(1, "a", 0.0)
    standby.restart(5.0)
    assert not standby.tick(5.9)
    assert standby.tick(6.0)


def test_only_the_leader_shows_itself() -> None:
    """A standby's beacon would hide a dead leader from a third."""
    leader = Leadership("a", 0.0)
    assert not leader.beacon_due(0.5)
    leader.tick(SILENCE_S)
    assert leader.beacon_due(SILENCE_S)
    assert not leader.beacon_due(SILENCE_S + 0.01)
    assert leader.beacon_due(SILENCE_S + BEACON_S)


def test_a_vacant_office_is_taken_at_once() -> None:
    """Whoever knows that the leader is gone need not wait to miss it; the term is a new one."""
    standby = Leadership("b", 0.0)
    standby.beacon(3, "a", 0.0)
    standby.vacate("c")
    assert not standby.tick(0.01), "another than the leader has gone"
    standby.vacate("a")
    assert standby.tick(0.02)
    assert (standby.leader, standby.term) == ("b", 4)


def test_an_office_is_vacant_until_another_one_shows_itself() -> None:
    """Nor is it vacant for one who slept: somebody may have taken it meanwhile."""
    standby = Leadership("b", 0.0)
    standby.beacon(3, "a", 0.0)
    standby.vacate("a")
    standby.beacon(4, "c", 0.0)
    assert not standby.tick(0.5)
    standby.vacate("c")
    standby.restart(0.6)
    assert not standby.tick(0.7)


def test_who_resigned_never_leads_again() -> None:
    """A leader and a standby that drain leave the office to those who stay."""
    leader, standby = Leadership("a", 0.0), Leadership("b", 0.0)
    leader.tick(SILENCE_S)
    assert leader.resign()
    assert not standby.resign()
    standby.vacate("")
    for one in (leader, standby):
        one.echo(9)
        assert not one.tick(100.0)
        assert not one.beacon_due(100.0)


def test_three_schedulers_agree_soon_whatever_gets_lost() -> None:
    """With a third of all beacons lost, one leads a while after the loss ends, and all know it."""
    for seed in range(30):
        rng = random.Random(seed)
        everybody = [Leadership(name, 0.0) for name in "abc"]
        now = 0.0
        for now in itertools.takewhile(lambda t: t < 12.0, (i * 0.05 for i in range(1000))):
            for one in everybody:
                one.tick(now)
                if one.beacon_due(now):
                    for other in everybody:
                        if other is not one and (now > 8.0 or rng.random() > 0.33):
                            other.beacon(one.term, one.leader, now)
        assert sum(one.leading for one in everybody) == 1, f"seed {seed}"
        assert len({one.leader for one in everybody}) == 1, f"seed {seed}"
        assert len({one.highest for one in everybody}) == 1, f"seed {seed} at {now}"
