"""The breaker, driven by a clock that is passed in."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from shared.breaker import Breaker, Limits, Permit

LIMITS = Limits(failures=3, window_s=1.0, open_s=2.0, probe_s=5.0)


def entered(breaker: Breaker, now: float) -> Permit:
    permit = breaker.enter(now)
    assert permit is not None
    return permit


def broken(now: float) -> Breaker:
    breaker = Breaker(LIMITS)
    for _ in range(3):
        entered(breaker, now).end(False, now)
    return breaker


def test_opens_on_failures_within_the_window() -> None:
    breaker = broken(0.0)
    assert breaker.state(0.0) == "open"
    assert breaker.enter(1.9) is None
    assert (breaker.opened, breaker.refused) == (1, 1)


def test_failures_spread_out_do_not_open() -> None:
    breaker = Breaker(LIMITS)
    for now in (0.0, 0.6, 1.2, 1.8, 2.4):
        entered(breaker, now).end(False, now)
    assert breaker.state(2.4) == "closed"


def test_none_never_counts() -> None:
    """Cancelled calls and the client's own mistakes open nothing."""
    breaker = Breaker(LIMITS)
    for _ in range(100):
        entered(breaker, 0.0).end(None, 0.0)
    assert breaker.state(0.0) == "closed"


def test_one_probe_closes() -> None:
    breaker = broken(0.0)
    probe = entered(breaker, 2.0)
    assert breaker.enter(2.0) is None
    probe.end(True, 2.1)
    assert breaker.state(2.1) == "closed"
    assert breaker.enter(2.1) is not None


def test_failed_probe_opens_again() -> None:
    breaker = broken(0.0)
    entered(breaker, 2.0).end(False, 2.5)
    assert breaker.state(4.4) == "open"
    assert breaker.state(4.5) == "half_open"


@pytest.mark.parametrize("worked", [None, False, True])
def test_probe_slot_is_freed_however_it_ends(worked: bool | None) -> None:
    breaker = broken(0.0)
    entered(breaker, 2.0).end(worked, 2.0)
    assert breaker.enter(4.0) is not None


def test_probe_that_never_ends_is_given_up() -> None:
    """Its late verdict has no say over the probe that follows."""
    breaker = broken(0.0)
    lost = entered(breaker, 2.0)
    assert breaker.enter(6.9) is None
    second = entered(breaker, 7.0)
    lost.end(False, 7.1)
    assert breaker.state(7.1) == "half_open"
    second.end(True, 7.2)
    assert breaker.state(7.2) == "closed"


def test_calls_from_before_the_opening_have_no_say() -> None:
    breaker = Breaker(LIMITS)
    slow = [entered(breaker, 0.0) for _ in range(5)]
    for permit in slow[:3]:
        permit.end(False, 0.5)
    probe = entered(breaker, 2.5)
    slow[3].end(False, 2.6)
    slow[4].end(True, 2.6)
    assert breaker.enter(2.6) is None, "the probe still holds the slot"
    probe.end(True, 2.7)
    assert breaker.state(2.7) == "closed"


def test_a_permit_ends_once() -> None:
    breaker = Breaker(LIMITS)
    permit = entered(breaker, 0.0)
    for _ in range(5):
        permit.end(False, 0.0)
    assert breaker.state(0.0) == "closed"


class Machine(RuleBasedStateMachine):
    """Never more than one live probe, and never stuck: time alone lets a call through again."""

    permits: Bundle[Permit] = Bundle("permits")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.breaker = Breaker(LIMITS)

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.1, 2.0, 5.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(target=permits)
    def enter(self) -> Permit:
        state = self.breaker.state(self.now)
        permit = self.breaker.enter(self.now)
        if permit is None:
            assert state != "closed"
            return Permit(Breaker(LIMITS), 0)
        assert state != "open"
        if state == "half_open":
            assert self.breaker.enter(self.now) is None
        return permit

    @rule(permit=consumes(permits), worked=st.sampled_from([True, False, None]))
    def end(self, permit: Permit, worked: bool | None) -> None:
        permit.end(worked, self.now)

    @invariant()
    def time_heals(self) -> None:
        later = self.now + LIMITS.open_s + LIMITS.probe_s
        assert self.breaker.state(later) != "open"


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, deadline=None)
