"""A scheduler learns what its workers hold, leading or not, and places by it."""

from typing import Any

from shared.ids import pack_ids
from shared.kv import SHORT_SIZE, block_hashes
from shared.messages import AskBlocks, BlocksChanged, Died, Run
from tests.services.scheduler.rig import Rig

IDS = range(60)
HASHES = block_hashes(IDS, b"salt")
PROMPT: dict[str, Any] = {"prompt_ids": pack_ids(IDS), "block_hashes": b"".join(HASHES)}
SHORTS = b"".join(name[:SHORT_SIZE] for name in HASHES)


def told(rig: Rig, worker: str, seq: int, added: bytes, *, whole: bool = False) -> None:
    rig.say(BlocksChanged(worker=worker, seq=seq, added=added, whole=whole))


def asked(rig: Rig) -> list[str]:
    return [worker for worker, _ in rig.sent(AskBlocks)]


def worker_of(rig: Rig, request_id: str) -> str:
    rig.submit(request_id, **PROMPT)
    [(worker, _)] = rig.sent(Run)
    return str(worker)


def rig_of(*names: str, **config: object) -> Rig:
    """A standby that has heard of these workers, and of a detokenizer."""
    rig = Rig(**config)
    for name in names:
        rig.beat(name, total_blocks=100)
    rig.beat("d0")
    return rig


def test_a_leg_goes_to_the_worker_that_said_it_has_the_prefix() -> None:
    """Also when a leader that has just taken office heard it as a standby."""
    rig = rig_of("w0", "w1")
    told(rig, "w0", 0, b"", whole=True)
    told(rig, "w1", 0, b"", whole=True)
    told(rig, "w1", 1, SHORTS)
    rig.lead()
    assert worker_of(rig, "r1") == "w1"


def test_what_a_prefix_saves_does_not_wait_at_its_worker() -> None:
    """Four legs of one prefix at once: credit is for what is really to be computed."""
    rig = rig_of("w0")
    told(rig, "w0", 0, SHORTS, whole=True)
    rig.lead()
    for number in range(4):
        assert worker_of(rig, f"r{number}") == "w0"
    missing = len(IDS) - 16 * len(HASHES)
    assert rig.core.peers.workers["w0"].prefill_tokens == 4 * missing


def test_a_worker_is_asked_once_a_second_until_it_answers() -> None:
    """A scheduler that comes late, or missed a message, does not wait for the next change."""
    rig = rig_of("w0", "w1")
    told(rig, "w0", 0, b"", whole=True)
    rig.pass_time(1.9)
    assert asked(rig) == ["w1", "w1"]
    told(rig, "w1", 3, b"", whole=True)
    rig.pass_time(1.5)
    assert asked(rig) == []
    told(rig, "w1", 5, SHORTS)
    rig.pass_time(0.5)
    assert asked(rig) == ["w1"]


def test_only_workers_that_can_answer_are_asked() -> None:
    """Not one without blocks, one that is leaving, or any when nothing is to be known."""
    rig = Rig()
    rig.beat("w0")
    rig.beat("w1", total_blocks=100, draining=True)
    rig.beat("w2", total_blocks=100, ready=False)
    rig.pass_time(0.5)
    assert asked(rig) == []
    rig = rig_of("w0", known_blocks_max=0)
    rig.pass_time(0.5)
    assert asked(rig) == []


def test_a_worker_that_is_gone_is_forgotten_and_its_successor_is_another() -> None:
    """What a dead instance says late is nobody's."""
    rig = rig_of("w0", "w1")
    for name in ("w0", "w1"):
        told(rig, name, 0, SHORTS if name == "w1" else b"", whole=True)
    rig.lead()
    rig.say(Died(instance="w1", reason="killed"))
    del rig.alive["w1"]
    told(rig, "w1", 1, SHORTS)
    rig.beat("w2", total_blocks=100)
    rig.pass_time(0.1)
    assert asked(rig) == ["w2"]
    assert worker_of(rig, "r1") == "w0"


def test_the_index_is_bounded_over_all_workers() -> None:
    """Who comes when it is full is not known, which is counted, and harms nobody."""
    rig = rig_of("w0", "w1", known_blocks_max=len(HASHES))
    told(rig, "w0", 0, SHORTS, whole=True)
    told(rig, "w1", 0, SHORTS, whole=True)
    assert rig.core.counters["blocks_unknown"] == 1
    held = [len(worker.prefixes) for worker in rig.core.peers.workers.values()]
    assert held == [len(HASHES), 0]
    rig.lead()
    assert worker_of(rig, "r1") == "w0"
