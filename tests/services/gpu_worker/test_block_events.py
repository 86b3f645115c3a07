"""Schedulers hear which blocks a worker holds: all of it, and nothing while nothing changes."""

import pytest

from services.gpu_worker import block_events, block_pool
from services.gpu_worker.block_events import EVERY_S
from shared.kv import SHORT_SIZE
from shared.messages import AskBlocks, BlocksChanged, Cancel
from shared.subjects import everyone, inbox
from tests.services.gpu_worker.engine_kit import SIM, Worker


class Ear:
    """What a scheduler makes of what a worker says to all of them, or to one that asked."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.shorts: set[bytes] = set()
        self.seq = 0

    def listen(self, subject: str) -> list[BlocksChanged]:
        """What came on `subject` since the last time, taken in its order."""
        told = [
            envelope.message
            for envelope in self.worker.core.outbox.take()
            if isinstance(envelope.message, BlocksChanged) and envelope.subject == subject
        ]
        for message in told:
            assert message.seq in (self.seq, self.seq + 1) or message.whole
            self.seq = message.seq
            if message.whole:
                self.shorts = set()
            self.shorts -= set(cut(message.removed))
            self.shorts |= set(cut(message.added))
        return told

    def knows_all(self) -> bool:
        return self.shorts == {name[:SHORT_SIZE] for name in self.worker.core.pool.names}


def cut(shorts: bytes) -> list[bytes]:
    return [shorts[i : i + SHORT_SIZE] for i in range(0, len(shorts), SHORT_SIZE)]


def wait(worker: Worker) -> None:
    worker.now += EVERY_S
    worker.core.tick(worker.now)


def test_what_is_named_and_what_is_evicted_is_told() -> None:
    """Through more legs than the pool has blocks for, who listens knows what is there."""
    worker = Worker(SIM)
    ear = Ear(worker)
    for choice in range(30):
        worker.run(choice=choice, salt=bytes([choice]) * 32)
        worker.steps()
        wait(worker)
        assert ear.listen(everyone("scheduler"))
        assert ear.knows_all()
    assert len(ear.shorts) == SIM.num_blocks - SIM.num_blocks % 3  # 40 ids and 12: three full ones


def test_changes_gather_and_an_idle_worker_is_silent() -> None:
    """One message for what happened meanwhile, then none."""
    worker = Worker()
    ear = Ear(worker)
    worker.run()
    steps = worker.steps()
    told = ear.listen(everyone("scheduler"))
    assert 0 < len(told) <= 1 + steps * 0.02 / EVERY_S
    worker.run(choice=1, salt=b"1" * 32)
    worker.steps(1)
    worker.core.receive(Cancel(request_id="r", choice=1, epoch=1), worker.now)
    assert not ear.knows_all()
    due = worker.core.wake_at(worker.now)
    assert due is not None
    worker.core.tick(due)
    ear.listen(everyone("scheduler"))
    assert ear.knows_all()
    assert worker.core.wake_at(due) is None
    worker.core.outbox.take()
    for _ in range(20):
        wait(worker)
    assert worker.core.outbox.take() == []


def test_who_asks_is_told_all_and_can_go_on_from_there() -> None:
    """The answer goes to the asker alone, and what is told to everyone next follows it."""
    worker = Worker()
    worker.run()
    worker.steps()
    worker.core.outbox.take()
    late = Ear(worker)
    worker.core.receive(AskBlocks(scheduler="s-2"), worker.now)
    [answer] = late.listen(inbox("s-2"))
    assert answer.whole
    assert late.knows_all()
    worker.run(choice=1, salt=b"1" * 32)
    worker.steps()
    wait(worker)
    assert late.listen(everyone("scheduler"))
    assert late.knows_all()


def test_an_empty_worker_answers_too() -> None:
    """Nothing is an answer: who asked need not ask again."""
    worker = Worker()
    worker.core.receive(AskBlocks(scheduler="s-2"), worker.now)
    [answer] = Ear(worker).listen(inbox("s-2"))
    assert (answer.whole, answer.seq, answer.added) == (True, 0, b"")


def test_more_than_fits_a_message_is_told_as_a_whole_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No message is over its bound, nothing is kept beyond it, and all is known in the end."""
    for module in (block_pool, block_events):
        monkeypatch.setattr(module, "CHANGES_MAX", 2)
    worker = Worker()
    ear = Ear(worker)
    worker.run()
    worker.steps(1)
    wait(worker)
    told = ear.listen(everyone("scheduler"))
    worker.run(choice=1, salt=b"1" * 32)
    worker.run(choice=2, salt=b"2" * 32)
    worker.steps(1)
    assert len(worker.core.pool.changes) <= 3
    wait(worker)
    told += ear.listen(everyone("scheduler"))
    assert [message.whole for message in told] == [False, True, False, False]
    assert max(len(message.added) for message in told) == 2 * SHORT_SIZE
    assert ear.knows_all()
