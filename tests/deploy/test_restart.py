"""When a child is started again, and when silence is a hang."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.restart import RestartPolicy, Restarts, Silence, SilencePolicy

NO_JITTER = RestartPolicy(jitter=0.0)


def restarts(policy: RestartPolicy = NO_JITTER) -> Restarts:
    return Restarts(policy, random.Random(1))


def test_delays_double_until_the_child_is_given_up() -> None:
    """Five restarts in 30 s, each waiting twice as long as the one before; then no more."""
    child = restarts()
    delays = [child.next_delay(now=0.0) for _ in range(6)]

    assert delays == [0.1, 0.2, 0.4, 0.8, 1.6, None]
    assert child.total == 5


def test_a_child_that_dies_rarely_is_never_given_up() -> None:
    """Deaths outside the window are forgotten, and the delay starts small again."""
    child = restarts()

    assert [child.next_delay(now=31.0 * n) for n in range(20)] == [0.1] * 20
    assert child.total == 20


def test_the_delay_is_capped() -> None:
    """However many restarts are allowed, none waits longer than the cap."""
    child = restarts(RestartPolicy(limit=20, jitter=0.0))

    assert max(child.next_delay(0.0) or 0.0 for _ in range(20)) == 5.0


@given(gaps=st.lists(st.floats(0, 60), max_size=60), limit=st.integers(1, 8), seed=st.integers())
def test_no_window_has_more_restarts_than_the_limit(
    gaps: list[float], limit: int, seed: int
) -> None:
    """Whenever the deaths come: in any 30 s there are at most `limit` restarts, each in bounds."""
    policy = RestartPolicy(limit=limit)
    child = Restarts(policy, random.Random(seed))
    now, granted = 0.0, []
    for gap in gaps:
        now += gap
        delay = child.next_delay(now)
        recent = [at for at in granted if now - at < policy.window_s]
        assert (delay is None) == (len(recent) >= limit)
        if delay is not None:
            assert policy.base_s <= delay <= policy.cap_s * (1 + policy.jitter)
            granted.append(now)


def test_a_child_that_speaks_is_left_alone() -> None:
    """Only silence beyond the limit is a hang."""
    silence = Silence(SilencePolicy(), now=0.0)
    for tick in range(400):
        silence.heard(tick * 0.25)
        assert silence.too_long(tick * 0.25 + 9.9) is None

    assert silence.too_long(399 * 0.25 + 10.1) == 10.0


def test_a_child_that_never_spoke_has_longer() -> None:
    """Importing on a cold, busy machine takes longer than a beat."""
    silence = Silence(SilencePolicy(), now=0.0)

    assert silence.too_long(59.0) is None
    assert silence.too_long(61.0) == 60.0


@pytest.mark.parametrize("away_s", [1.0, 3600.0])
def test_a_watcher_that_slept_knows_nothing(away_s: float) -> None:
    """Silence while the watcher was away is not held against the child."""
    silence = Silence(SilencePolicy(), now=0.0)
    silence.heard(0.0)
    silence.slept(away_s)

    assert silence.too_long(away_s + 9.9) is None
    assert silence.too_long(away_s + 10.1) == 10.0
