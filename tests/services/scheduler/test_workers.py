"""Who is dead, who hangs, and how much each has in hand between two beats."""

from typing import Any

from services.scheduler.workers import REMEMBER_S, SETTLE_S, Gone, Peers, Sent
from shared.messages import Beat


def beat(instance: str = "w", **fields: Any) -> Beat:
    defaults: dict[str, Any] = {"role": "gpu_worker", "seq": 1}
    return Beat(instance=instance, **defaults | fields)


def test_silence_of_a_second_is_a_loss_and_a_late_beat_is_life() -> None:
    """A worker that was only slow comes back with its next beat; so its legs killed nobody."""
    peers = Peers()
    peers.hear(beat(), 0.0)
    assert peers.tick(0.99) == []
    assert peers.tick(1.0) == [Gone("w", hung=True)]
    assert peers.tick(1.1) == []
    assert not peers.usable("w")
    peers.hear(beat(seq=2), 1.5)
    assert peers.usable("w")


def test_died_is_believed_at_once_and_for_good() -> None:
    """Beats that were on their way when the process ended do not revive it."""
    peers = Peers()
    peers.hear(beat(), 0.0)
    assert peers.died("w", 0.1) == Gone("w", hung=False)
    assert peers.died("w", 0.2) is None
    peers.hear(beat(seq=2), 0.2)
    assert not peers.workers
    assert peers.died("tokenizer-0", 0.3) is None


def test_a_worker_past_its_phase_bound_hangs_until_it_steps() -> None:
    """A hang is reported once; a long phase that was announced is none."""
    peers = Peers()
    peers.hear(beat(step=5, phase_age_ms=900, phase_bound_ms=1000), 0.0)
    assert peers.tick(0.1) == []
    peers.hear(beat(seq=2, step=5, phase_age_ms=1100, phase_bound_ms=1000), 0.2)
    assert peers.tick(0.2) == [Gone("w", hung=True)]
    peers.hear(beat(seq=3, step=5, phase_age_ms=1200, phase_bound_ms=1000), 0.3)
    assert peers.tick(0.3) == []
    assert not peers.workers["w"].placeable
    peers.hear(beat(seq=4, step=6, phase_age_ms=0, phase_bound_ms=1000), 0.4)
    assert peers.workers["w"].placeable


def test_a_watcher_that_slept_declares_nobody_dead() -> None:
    """After a restart of the clocks every peer has its second again."""
    peers = Peers()
    peers.hear(beat(), 0.0)
    peers.restart(5.0)
    assert peers.tick(5.9) == []
    assert peers.tick(6.0) == [Gone("w", hung=True)]


def test_losses_are_remembered_for_a_new_leader_unless_they_came_back() -> None:
    """Whoever is back is not declared lost again."""
    peers = Peers()
    peers.hear(beat("a"), 0.0)
    peers.hear(beat("b"), 0.0)
    peers.tick(1.0)
    peers.hear(beat("b", seq=2), 1.5)
    assert peers.recent(2.0) == [Gone("a", hung=True)]
    assert peers.recent(1.0 + REMEMBER_S + 0.1) == []


def test_what_was_sent_counts_until_a_beat_can_show_it() -> None:
    """Between beats a worker is as full as what was sent to it makes it."""
    peers = Peers()
    peers.hear(beat(free_blocks=10, load=1), 0.0)
    worker = peers.workers["w"]
    worker.send(Sent(("r", 0), 0.0, tokens=32, blocks=3))
    assert (worker.num_legs, worker.prefill_tokens, worker.free_blocks) == (2, 32, 7)
    peers.hear(beat(seq=2, free_blocks=10, load=1), SETTLE_S / 2)
    assert worker.num_legs == 2
    peers.hear(beat(seq=3, free_blocks=7, load=2), SETTLE_S)
    assert (worker.num_legs, worker.free_blocks) == (2, 7)
    worker.end(("r", 0))
    assert worker.num_legs == 1


def test_what_was_sent_during_a_long_step_counts_until_it_ends() -> None:
    """Inside a step an engine takes nothing, so its beats cannot show what came meanwhile."""
    peers = Peers()
    peers.hear(beat(phase="prefill", phase_age_ms=100, phase_bound_ms=20_000), 0.0)
    worker = peers.workers["w"]
    worker.send(Sent(("r", 0), 0.1, tokens=32, blocks=3))
    peers.hear(beat(seq=2, phase="prefill", phase_age_ms=1100, phase_bound_ms=20_000), 1.0)
    assert worker.num_legs == 1
    peers.hear(beat(seq=3, step=1, phase="prefill", phase_bound_ms=20_000, load=1), 1.1)
    assert (worker.num_legs, worker.prefill_tokens) == (1, 0)


def test_a_leg_is_isolated_until_its_first_id_is_text() -> None:
    """Its workers died before its next id, or those did that make text of it; innocent legs, too,
    were there when they did.
    """
    peers = Peers()
    peers.hear(beat(step=7), 0.0)
    worker = peers.workers["w"]
    worker.isolate(("r", 0), 0.0)
    worker.send(Sent(("r", 0), 0.0, tokens=32, blocks=3))
    peers.hear(beat(seq=2, step=7, phase="decode", load=1), 0.1)
    peers.hear(beat(seq=3, step=8, phase="prefill", load=1), 0.2)
    assert worker.alone == ("r", 0)
    peers.hear(beat(seq=4, step=9, phase="decode", load=1), 0.3)
    assert worker.alone == ("r", 0)
    peers.hear(beat(seq=5, step=14, phase="decode", load=1), 0.4)
    assert worker.alone is None


def test_an_older_beat_does_not_overwrite_a_newer() -> None:
    """The bus may deliver beats in any order."""
    peers = Peers()
    peers.hear(beat(seq=5, load=5), 0.0)
    peers.hear(beat(seq=4, load=1), 0.1)
    assert peers.workers["w"].beat.load == 5
