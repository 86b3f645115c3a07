"""The worker's part of the protocol, and that no path through it changes or loses an id."""

import dataclasses
from typing import Any

import msgspec
import pytest

from services.gpu_worker.config import SimConfig, WorkerConfig
from services.gpu_worker.engine_core import EngineBroken, EngineCore
from services.gpu_worker.runner import Sampled, Scheduled
from services.gpu_worker.simulated import SimulatedRunner
from shared.ids import pack_ids, unpack_ids
from shared.messages import (
    Beacon,
    Cancel,
    Ended,
    Failed,
    Renew,
    Renewed,
    RenewedLeg,
    RenewLeg,
    RouteLost,
    Run,
    Started,
    StepDone,
    StepRecord,
    Submit,
    TextContext,
)
from shared.sampling import SamplingParams, TextParams
from shared.subjects import inbox

PROMPT = list(range(1, 41))
END_ID = 999
SIM = SimConfig(num_blocks=64, max_model_len=400, vocab_size=1000, output_tokens_max=0)


@dataclasses.dataclass
class Sent:
    """What the core put out, by kind."""

    started: list[Started]
    records: list[StepRecord]
    ended: list[tuple[str, int, str]]  # scheduler, epoch, reason
    failed: list[Failed]
    lost: list[RouteLost]
    renewed: list[RenewedLeg]
    detokenizers: set[str]

    @property
    def ids(self) -> list[int]:
        return [i for record in self.records for i in unpack_ids(record.ids)]


class Worker:
    """A core with a simulated model, its clock, and what it says."""

    def __init__(self, sim: SimConfig = SIM, runner: Any = None, **config: Any) -> None:
        self.runner = runner or SimulatedRunner(sim, words=range(900), end_ids=[END_ID])
        self.now = 100.0
        self.core = EngineCore("w-1", self.runner, WorkerConfig(**config), self.now)

    def run(self, epoch: int = 1, term: int = 1, choice: int = 0, **changes: Any) -> None:
        self.core.receive(run(epoch, term, choice, **changes), self.now)

    def steps(self, count: int = 1000) -> int:
        for done in range(count):
            if not self.core.step(self.now):
                return done
            self.now += 0.02
            self.core.tick(self.now)
            self.core.batcher.check_integrity()
        return count

    def take(self) -> Sent:
        sent = Sent([], [], [], [], [], [], set())
        for subject, message in self.core.outbox.take():
            match message:
                case Started():
                    assert subject == inbox("g-1")
                    sent.started.append(message)
                case StepDone():
                    sent.detokenizers.add(subject)
                    sent.records += message.records
                case Ended():
                    sent.ended += [(subject, leg.epoch, leg.reason) for leg in message.legs]
                case Failed():
                    sent.failed.append(message)
                case RouteLost():
                    sent.lost.append(message)
                case Renewed():
                    sent.renewed += message.legs
        return sent

    def renew(self, epoch: int = 1, choice: int = 0) -> RenewedLeg:
        question = RenewLeg("r", choice, epoch, 0)
        self.core.receive(Renew(gateway="g-1", legs=[question]), self.now)
        (answer,) = [e.message for e in self.core.outbox.take() if isinstance(e.message, Renewed)]
        return answer.legs[0]

    def assert_empty(self) -> None:
        self.core.batcher.check_integrity()
        assert self.core.free_blocks == self.core.spec.num_blocks
        assert self.core.load == self.core.waiting == self.core.prefill_tokens_waiting == 0


def run(epoch: int = 1, term: int = 1, choice: int = 0, **changes: Any) -> Run:
    submit = Submit(
        request_id="r",
        choice=choice,
        epoch=epoch,
        gateway="g-1",
        model="m",
        tenant="t",
        prompt_ids=pack_ids(PROMPT),
        sampling=SamplingParams(max_tokens=12, seed=7),
    )
    detokenizer = changes.pop("detokenizer", "d-1")
    scheduler = changes.pop("scheduler", "s-1")
    if "output_ids" in changes:
        changes["output_ids"] = pack_ids(changes["output_ids"])
    submit = msgspec.structs.replace(submit, **changes)
    return Run(submit=submit, scheduler=scheduler, term=term, detokenizer=detokenizer)


def truth(**changes: Any) -> list[int]:
    """The ids of the leg on a worker where nothing goes wrong."""
    worker = Worker()
    worker.run(**changes)
    worker.steps()
    return worker.take().ids


# --- a leg's ordinary life ---


def test_a_leg_runs_from_started_to_ended() -> None:
    """`Started` at once, one record per id in order, context on the first, the end on the last."""
    worker = Worker()
    worker.run(text=TextParams(stop=("x",)))
    started = worker.take().started
    worker.steps()
    sent = worker.take()

    assert [(s.epoch, s.worker, s.detokenizer, s.adopted) for s in started] == [
        (1, "w-1", "d-1", False)
    ]
    assert [record.index for record in sent.records] == list(range(12))
    assert [record.end for record in sent.records] == [""] * 11 + ["length"]
    assert {record.gateway for record in sent.records} == {"g-1"}
    assert sent.records[0].context == TextContext(
        pack_ids(PROMPT[-8:]), b"", TextParams(stop=("x",)), False
    )
    assert [record.context for record in sent.records[1:]] == [None] * 11
    assert sent.ended == [(inbox("s-1"), 1, "length")]
    assert sent.detokenizers == {inbox("d-1")}
    worker.assert_empty()


def test_a_step_makes_one_message_per_detokenizer() -> None:
    """Legs that share a detokenizer share a `StepDone`."""
    worker = Worker()
    for choice in range(3):
        worker.run(choice=choice, detokenizer=f"d-{choice % 2}", salt=bytes([choice]) * 32)
    worker.take()
    worker.steps(1)
    done = [e.message for e in worker.core.outbox.take() if isinstance(e.message, StepDone)]

    assert sorted(len(message.records) for message in done) == [1, 2]


def test_silence_brings_the_context_again() -> None:
    """A record after more than 2 s without one says all that a reader may have dropped."""
    worker = Worker()
    worker.run()
    worker.steps(3)
    worker.take()
    worker.now += 2.5
    worker.steps(1)
    (record,) = worker.take().records

    assert record.context is not None
    assert unpack_ids(record.context.output_ids) == truth()[:3]


@pytest.mark.parametrize(
    ("sampling", "end", "count"),
    [
        ({"max_tokens": 5}, "length", 5),
        ({"max_tokens": 50}, "stop", 9),
        ({"max_tokens": 50, "min_tokens": 20}, "stop", 21),
        ({"max_tokens": 30, "ignore_eos": True}, "length", 30),
        ({"max_tokens": 9}, "stop", 9),
    ],
)
def test_the_worker_ends_a_leg_at_an_end_id_or_a_limit(
    sampling: dict[str, Any], end: str, count: int
) -> None:
    """End ids count after min_tokens and unless ignored; at the same id `stop` beats `length`."""
    sim = msgspec.structs.replace(SIM, output_tokens_min=9, output_tokens_max=9)
    worker = Worker(sim)
    worker.run(sampling=SamplingParams(seed=7, **sampling))
    worker.steps()
    records = worker.take().records

    assert (records[-1].end, len(records)) == (end, count)
    worker.assert_empty()


def test_stop_ids_of_the_request_end_it() -> None:
    """A stop id that the model makes is the last id, even with ignore_eos."""
    ids = truth()
    worker = Worker()
    sampling = SamplingParams(max_tokens=12, seed=7, stop_token_ids=(ids[4],), ignore_eos=True)
    worker.run(sampling=sampling)
    worker.steps()
    sent = worker.take()

    assert sent.ids == ids[:5]
    assert sent.records[-1].end == "stop"


def test_the_context_ends_a_leg() -> None:
    """Prompt and answer together fill the model's context and no more."""
    worker = Worker(msgspec.structs.replace(SIM, max_model_len=45))
    worker.run()
    worker.steps()
    sent = worker.take()

    assert (len(sent.ids), sent.records[-1].end) == (5, "length")


def test_logprobs_travel_one_per_id() -> None:
    """Each id has its logprobs in the same record."""
    worker = Worker()
    worker.run(sampling=SamplingParams(max_tokens=4, seed=7, logprobs=2))
    worker.steps()
    records = worker.take().records

    assert [len(record.logprobs or []) for record in records] == [1] * 4
    assert records[0].context is not None
    assert records[0].context.logprobs


# --- re-drives ---


@pytest.mark.parametrize("delivered", range(12))
def test_a_re_drive_elsewhere_makes_the_ids_that_were_missing(delivered: int) -> None:
    """Output ids that came with the leg are prefill; sampling goes on at the next position."""
    ids = truth()
    worker = Worker()
    worker.run(epoch=5, output_ids=ids[:delivered])
    worker.steps()
    sent = worker.take()

    assert sent.records[0].index == delivered
    assert sent.records[0].context is not None
    assert unpack_ids(sent.records[0].context.output_ids) == ids[:delivered]
    assert sent.ids == ids[delivered:]


def test_adopting_a_running_leg_sends_again_and_goes_on() -> None:
    """A higher epoch of the same ids takes the leg over: new detokenizer, no prefill."""
    ids = truth()
    worker = Worker()
    worker.run()
    worker.steps(6)
    worker.take()
    worker.run(epoch=2, output_ids=ids[:2], detokenizer="d-2", scheduler="s-2")
    (again,) = worker.core.outbox.take()[1:]
    assert isinstance(again.message, StepDone)
    (record,) = again.message.records
    worker.steps()
    sent = worker.take()

    assert again.subject == inbox("d-2")
    assert (record.epoch, record.index) == (2, 2)
    assert record.context is not None
    assert unpack_ids(record.context.output_ids) == ids[:2]
    assert unpack_ids(record.ids) + sent.ids == ids[2:]
    assert {r.epoch for r in sent.records} == {2}
    assert sent.ended == [(inbox("s-2"), 2, "length")]
    assert worker.core.counters["legs_taken"] == 1
    worker.assert_empty()


def test_adopting_sends_the_logprobs_again() -> None:
    """What is sent again is complete."""
    sampling = SamplingParams(max_tokens=12, seed=7, logprobs=1)
    worker = Worker()
    worker.run(sampling=sampling)
    worker.steps(6)
    first = worker.take()
    worker.run(epoch=2, sampling=sampling, output_ids=first.ids[:2])
    again = worker.take()

    assert again.records[0].logprobs == [lp for r in first.records[2:] for lp in r.logprobs or []]


def test_a_leg_that_just_finished_is_adopted() -> None:
    """The lost tail of a finished leg is sent again with its end, and nothing is computed."""
    ids = truth()
    worker = Worker()
    worker.run()
    worker.steps()
    worker.take()
    worker.now += 9
    worker.run(epoch=2, output_ids=ids[:9])
    sent = worker.take()

    assert [s.adopted for s in sent.started] == [True]
    assert [(r.index, unpack_ids(r.ids), r.end) for r in sent.records] == [(9, ids[9:], "length")]
    assert sent.ended == [(inbox("s-1"), 2, "length")]
    assert worker.renew(2).state == "done"
    assert worker.steps() == 0


def test_a_leg_that_finished_long_ago_is_taken_anew() -> None:
    """After 10 s the worker has forgotten the ids; it computes them again, the same."""
    ids = truth()
    worker = Worker()
    worker.run()
    worker.steps()
    worker.take()
    worker.now += 11
    worker.run(epoch=2, output_ids=ids[:9])
    worker.steps()
    sent = worker.take()

    assert [s.adopted for s in sent.started] == [False]
    assert sent.ids == ids[9:]


def test_other_ids_are_not_adopted() -> None:
    """A re-drive that delivered other ids than these supersedes the leg and starts anew."""
    ids = truth()
    worker = Worker()
    worker.run()
    worker.steps(6)
    worker.take()
    worker.run(epoch=2, output_ids=[ids[0] + 1])
    sent = worker.take()

    assert [s.adopted for s in sent.started] == [False]
    assert sent.ended == [(inbox("s-1"), 1, "moved")]
    worker.steps()
    assert {r.epoch for r in worker.take().records} == {2}
    worker.assert_empty()


def test_a_preempted_leg_can_be_adopted() -> None:
    """Blocks are not what makes a leg adoptable; its ids are."""
    sim = msgspec.structs.replace(SIM, num_blocks=6)
    sampling = SamplingParams(max_tokens=30, seed=7)
    expected = truth(sampling=sampling)
    worker = Worker(sim)
    worker.run(choice=1, sampling=sampling, salt=b"1" * 32)
    worker.run(choice=0, sampling=sampling, prompt_ids=pack_ids(PROMPT[:20]))
    while worker.core.batcher.num_preemptions == 0:
        assert worker.steps(1)
    ids = [i for r in worker.take().records if r.choice == 0 for i in unpack_ids(r.ids)]
    assert worker.renew(1, choice=0).state == "paused"
    worker.run(2, prompt_ids=pack_ids(PROMPT[:20]), sampling=sampling, output_ids=ids[:1])
    worker.steps()
    records = worker.take().records

    again = [i for r in records if r.choice == 0 for i in unpack_ids(r.ids)]
    other = [i for r in records if r.choice == 1 for i in unpack_ids(r.ids)]
    assert ids[:1] + again == truth(sampling=sampling, prompt_ids=pack_ids(PROMPT[:20]))
    assert other == expected[-len(other) :]
    worker.assert_empty()


# --- fences ---


def test_a_duplicate_run_is_ignored() -> None:
    """The same epoch twice changes nothing, while it runs and after it ended."""
    worker = Worker()
    worker.run()
    worker.run()
    worker.steps()
    worker.run()
    sent = worker.take()

    assert len(sent.started) == 1
    assert sent.ids == truth()
    assert worker.core.counters["run_stale"] == 2


def test_a_run_of_a_lower_term_is_dropped() -> None:
    """A deposed leader places nothing; the highest term heard is known for the beats."""
    worker = Worker()
    worker.core.receive(Beacon(scheduler="s-2", term=4, pool="default"), worker.now)
    worker.run(term=3)

    assert worker.take().started == []
    assert worker.core.term == 4
    worker.run(term=4)
    assert len(worker.take().started) == 1


def test_cancel_ends_all_epochs_up_to_it_and_leaves_a_tombstone() -> None:
    """The blocks are free at once, and a late `Run` of an ended epoch finds a closed door."""
    worker = Worker()
    worker.run(epoch=3)
    worker.steps(2)
    worker.take()
    worker.core.receive(Cancel(request_id="r", choice=0, epoch=4), worker.now)
    sent = worker.take()

    assert sent.ended == [(inbox("s-1"), 3, "cancelled")]
    worker.assert_empty()
    worker.run(epoch=4)
    assert worker.take().started == []
    worker.run(epoch=5)
    assert len(worker.take().started) == 1


def test_a_cancel_that_comes_before_its_run_wins() -> None:
    """Reordering does not resurrect a cancelled leg."""
    worker = Worker()
    worker.core.receive(Cancel(request_id="r", choice=0, epoch=1), worker.now)
    worker.run(epoch=1)

    assert worker.take().started == []


def test_a_cancel_of_an_earlier_epoch_does_not_end_a_later_one() -> None:
    """Epochs are told apart."""
    worker = Worker()
    worker.run(epoch=2)
    worker.core.receive(Cancel(request_id="r", choice=0, epoch=1), worker.now)
    worker.steps()

    assert worker.take().ids == truth()


def test_tombstones_are_bounded() -> None:
    """Memory of the past has a limit in number and in time."""
    worker = Worker(tombstones_max=4)
    for choice in range(10):
        worker.core.receive(Cancel(request_id="r", choice=choice, epoch=1), worker.now)
    worker.core.tick(worker.now)
    for choice in range(10):
        worker.run(choice=choice)
    assert [s.choice for s in worker.take().started] == list(range(6))

    worker.now += 61
    worker.core.tick(worker.now)
    worker.run(choice=9)
    assert [s.choice for s in worker.take().started] == [9]


def test_finished_legs_are_bounded() -> None:
    """Only so many finished legs are kept with their ids."""
    worker = Worker(finished_max=2)
    for choice in range(4):
        worker.run(choice=choice)
    worker.steps()

    assert [worker.renew(choice=choice).state for choice in range(4)] == [
        "unknown",
        "unknown",
        "done",
        "done",
    ]


# --- leases and questions ---


def test_a_leg_that_nobody_renews_is_reaped() -> None:
    """5 s without a renewal: the gateway is gone, the blocks are free, the scheduler is told."""
    worker = Worker(msgspec.structs.replace(SIM, max_model_len=10_000))
    worker.run(sampling=SamplingParams(max_tokens=5000))
    worker.steps(240)  # 4.8 s
    assert worker.renew().state == "decode"
    worker.steps(240)
    assert worker.take().ended == []
    worker.steps(20)

    assert worker.take().ended == [(inbox("s-1"), 1, "reaped")]
    worker.assert_empty()


@pytest.mark.parametrize("excuse", ["slept", "late tick", "reconnected"])
def test_a_worker_that_slept_reaps_nobody(excuse: str) -> None:
    """What was missed while away is not held against a gateway."""
    worker = Worker()
    worker.run()
    worker.steps(2)
    if excuse == "reconnected":
        worker.core.connection_lost(worker.now)
    for _ in range(100 if excuse == "reconnected" else 0):
        worker.now += 0.1
        worker.core.tick(worker.now)
    if excuse != "reconnected":
        worker.now += 8
    if excuse == "slept":
        worker.core.slept(worker.now)
    if excuse == "reconnected":
        worker.core.reconnected(worker.now)
    worker.core.tick(worker.now)

    assert worker.renew().state == "decode"


def test_renewals_are_answered_with_state_and_progress() -> None:
    """prefill, decode, done, unknown, and how many ids have been sent."""
    worker = Worker(max_batched_tokens=64, max_legs=1)
    assert worker.renew().state == "unknown"
    worker.run()
    assert worker.renew() == RenewedLeg("r", 0, 1, "prefill", 0)
    worker.steps(4)
    assert worker.renew() == RenewedLeg("r", 0, 1, "decode", 4)
    assert worker.renew(epoch=2).state == "unknown"
    worker.steps()
    assert worker.renew() == RenewedLeg("r", 0, 1, "done", 12)
    worker.now += 11
    assert worker.renew().state == "unknown"


# --- refusals and faults ---


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"prompt_ids": b""}, "invalid_request", "prompt"),
        ({"prompt_ids": pack_ids([5, 1000])}, "invalid_request", "prompt"),
        ({"prompt_ids": b"abc"}, "invalid_request", "prompt"),
        ({"prompt_ids": pack_ids([5] * 400)}, "context_length_exceeded", "prompt"),
        (
            {"sampling": SamplingParams(max_tokens=5, logit_bias={1000: 1.0})},
            "invalid_request",
            "logit_bias",
        ),
        ({"salt": b"s" * 65}, "invalid_request", "cache_salt"),
        ({"sampling": SamplingParams(max_tokens=0)}, "invalid_request", "max_tokens"),
        ({"output_ids": list(range(12))}, "invalid_request", "max_tokens"),
    ],
)
def test_what_can_never_run_is_refused_at_once(
    changes: dict[str, Any], code: str, param: str
) -> None:
    """A typed error names the field; nothing is queued, and no retry elsewhere is asked for."""
    worker = Worker()
    worker.run(**changes)
    sent = worker.take()

    (failed,) = sent.failed
    assert (failed.code, failed.param, failed.retryable) == (code, param, False)
    assert sent.ended == [(inbox("s-1"), 1, "failed")]
    assert sent.started == []
    worker.assert_empty()


def test_a_pool_smaller_than_the_context_is_the_limit() -> None:
    """A prompt that fits the model but never the memory is refused, not queued for ever."""
    worker = Worker(msgspec.structs.replace(SIM, num_blocks=2))
    worker.run()
    assert worker.core.max_model_len == 32
    assert [f.code for f in worker.take().failed] == ["context_length_exceeded"]


def test_a_full_queue_refuses_with_advice() -> None:
    """Over the limit, a leg is told to go elsewhere or come back."""
    worker = Worker(max_waiting=2)
    for choice in range(3):
        worker.run(choice=choice)
    (failed,) = worker.take().failed

    assert (failed.choice, failed.code, failed.retryable) == (2, "overloaded", True)
    assert failed.retry_after_s


def test_nan_logits_fail_their_own_leg() -> None:
    """The others go on as if it had never been there."""
    worker = Worker(msgspec.structs.replace(SIM, nan_id=77))
    worker.run(choice=0)
    worker.run(choice=1, prompt_ids=pack_ids([77, *PROMPT]))
    worker.steps()
    sent = worker.take()

    (failed,) = sent.failed
    assert (failed.choice, failed.code, failed.retryable, failed.started) == (
        1,
        "internal",
        True,
        True,
    )
    assert sent.ids == truth()
    assert (inbox("s-1"), 1, "failed") in sent.ended
    worker.assert_empty()


class Raises:
    """A model that raises on some prompts."""

    def __init__(self, bad: int) -> None:
        self.inner = SimulatedRunner(SIM, words=range(900), end_ids=[END_ID])
        self.spec = self.inner.spec
        self.bad = bad

    def warm_up(self) -> None: ...

    def phase_bound_ms(self, batch: list[Scheduled]) -> int:
        return len(batch)

    def execute(self, batch: list[Scheduled]) -> list[Sampled | None]:
        if any(self.bad in row.sequence.prompt_ids for row in batch):
            raise MemoryError("no room")
        return self.inner.execute(batch)


def test_a_row_that_raises_fails_alone() -> None:
    """The step is repeated row by row: only the culprit's leg fails, the others lose nothing."""
    worker = Worker(runner=Raises(bad=77))
    worker.run(choice=0)
    worker.run(choice=1, prompt_ids=pack_ids([77, 78]))
    worker.steps()
    sent = worker.take()

    assert [(f.choice, f.code, f.retryable) for f in sent.failed] == [(1, "internal", True)]
    assert sent.ids == truth()
    worker.assert_empty()


def test_a_model_that_always_raises_ends_the_engine() -> None:
    """Three steps in a row without a good row: it is the model, and only a restart can help."""
    worker = Worker(runner=Raises(bad=1))

    def keep_trying() -> None:
        for choice in range(5):
            worker.run(choice=choice)
            worker.steps(1)

    with pytest.raises(EngineBroken):
        keep_trying()
    assert len(worker.take().failed) == 2


# --- drain ---


def test_a_draining_worker_finishes_what_it_has_and_sends_new_legs_elsewhere() -> None:
    """Nobody is cut, nobody new comes in."""
    worker = Worker()
    worker.run(choice=0)
    worker.core.refuse_new()
    worker.run(choice=1)
    worker.steps()
    sent = worker.take()

    assert [(lost.choice, lost.reason) for lost in sent.lost] == [(1, "drain")]
    assert sent.ids == truth()


def test_the_end_of_the_drain_moves_what_is_left() -> None:
    """Each leg's session hears of it, and nothing is held any more."""
    worker = Worker()
    for choice in range(3):
        worker.run(choice=choice)
    worker.steps(2)
    worker.take()
    worker.core.move_all(worker.now)
    sent = worker.take()

    assert sorted((lost.choice, lost.reason) for lost in sent.lost) == [
        (choice, "drain") for choice in range(3)
    ]
    assert [reason for _, _, reason in sent.ended] == ["moved"] * 3
    worker.assert_empty()
