"""A scheduler that hears nothing at all, not even itself, judges nobody and leads nobody."""

import pytest

from shared.messages import Beacon, Died, Lost
from tests.services.scheduler.rig import Rig


@pytest.fixture
def rig() -> Rig:
    return Rig().lead("w0", "w1", "d0")


def lost(rig: Rig) -> set[str]:
    """Who was declared lost since last asked."""
    return {message.instance for _, message in rig.sent(Lost)}


def test_a_bus_that_stood_still_has_cost_nobody(rig: Rig) -> None:
    """Whoever is heard again when the bus goes on was there all the time, for as long as a death
    takes after that; then a silence is a silence again.
    """
    rig.pass_silence(2.9)
    rig.pass_time(0.05)
    gone = rig.alive.pop("w0")
    rig.pass_time(0.8)
    assert (lost(rig), rig.core.num_workers) == (set(), 2)
    rig.pass_time(0.3)
    assert lost(rig) == {gone.instance}


def test_when_all_peers_are_gone_the_scheduler_still_hears_itself(rig: Rig) -> None:
    """The bus goes on, so each of them has fallen silent, and that after a second as ever."""
    rig.alive.clear()
    rig.pass_time(0.9)
    assert lost(rig) == set()
    rig.pass_time(0.2)
    assert lost(rig) == {"w0", "w1", "d0"}


def test_a_death_is_told_as_soon_as_anything_is_heard(rig: Rig) -> None:
    """Silence proves nothing, a word of the supervisor does, also as the first one."""
    rig.pass_silence(2.0)
    rig.say(Died(instance="w0", reason="killed"))
    assert lost(rig) == {"w0"}


def test_a_deaf_leader_does_not_show_itself(rig: Rig) -> None:
    """No Submit would reach it, so its standby, if that one hears, had better lead."""
    rig.pass_silence(0.6)
    rig.sent()
    rig.pass_silence(2.0)
    assert rig.sent(Beacon) == []
    rig.pass_time(0.3)
    assert rig.sent(Beacon) != []
    assert (rig.core.is_leader, rig.core.term) == (True, 1)


def test_a_deaf_standby_takes_no_office() -> None:
    """The leader's beacons stand where everything stands; then they have a second to come."""
    standby = Rig()
    beacon = Beacon(scheduler="l", term=1, pool="p")
    standby.say(beacon)
    standby.pass_silence(2.9)
    standby.pass_time(0.9)
    assert not standby.core.is_leader
    standby.say(beacon)
    standby.pass_time(0.9)
    assert not standby.core.is_leader
    standby.pass_time(0.2)
    assert standby.core.is_leader
