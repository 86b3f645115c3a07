"""Silence is judged by those who were awake to hear."""

from shared.liveness import DEAF_S, LATE_S, SILENCE_S, TICK_S, LastHeard, Watcher


def test_a_late_tick_means_that_the_watcher_slept() -> None:
    """Only a tick later than the bound is sleep; the first tick has nothing before it."""
    watcher = Watcher()
    assert not watcher.slept(100.0)
    assert not watcher.slept(100.0 + TICK_S + LATE_S)
    assert watcher.slept(101.0)
    assert not watcher.slept(101.0 + TICK_S)


def test_sleep_shows_before_any_death_can_be_believed() -> None:
    """A watcher that was away for as long as a death takes always knows that it was away."""
    assert TICK_S + LATE_S < SILENCE_S


def test_who_has_heard_nobody_for_a_while_hears_nothing() -> None:
    """One word of anybody ends it, and says once that the clocks begin there."""
    watcher = Watcher()
    assert not watcher.hears(100.0)
    assert watcher.heard(100.0)
    assert not watcher.heard(100.0 + DEAF_S - 0.01)
    assert watcher.hears(100.0 + DEAF_S)
    assert not watcher.hears(101.0)
    assert watcher.heard(101.0)
    assert watcher.hears(101.0)


def test_deafness_shows_before_any_death_can_be_believed() -> None:
    """Peers that beat four times a second fall silent for a deaf watcher after it knows."""
    slowest_beat_s = 0.25
    assert SILENCE_S - slowest_beat_s > DEAF_S


def test_a_peer_is_silent_after_the_bound_and_until_it_is_heard() -> None:
    """Silence counts from the last word, and a restart counts it anew for everybody."""
    heard = LastHeard(1.0)
    heard.heard("a", 10.0)
    heard.heard("b", 10.5)
    assert heard.silent(10.9) == []
    assert heard.silent(11.0) == ["a"]
    heard.restart(11.0)
    assert heard.silent(11.9) == []
    heard.heard("b", 11.5)
    assert heard.silent(12.0) == ["a"]
    heard.forget("a")
    assert heard.silent(12.0) == []
    assert "a" not in heard
    assert len(heard) == 1
