"""What a worker says of a leg from `Started` to its end, and when it lets go."""

from typing import Any

import msgspec
import pytest

from shared.ids import pack_ids, unpack_ids
from shared.messages import (
    RenewedLeg,
    StepDone,
    TextContext,
)
from shared.sampling import SamplingParams, TextParams
from shared.subjects import inbox
from tests.services.gpu_worker.engine_kit import PROMPT, SIM, Worker, truth


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


def test_long_steps_are_no_sleep() -> None:
    """A worker whose every step takes a second still reaps what nobody renews."""
    worker = Worker()
    worker.run()
    for _ in range(8):
        worker.core.step(worker.now)
        worker.now += 1
        worker.core.tick(worker.now)

    assert [reason for _, _, reason in worker.take().ended] == ["reaped"]


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


def test_a_draining_worker_finishes_what_it_has_and_sends_new_legs_elsewhere() -> None:
    """Nobody is cut, nobody new comes in, and nobody waits here for a place."""
    worker = Worker()
    worker.run(choice=0)
    worker.steps(1)
    worker.run(choice=1)  # still waits
    worker.core.refuse_new(worker.now)
    worker.run(choice=2)
    worker.steps()
    sent = worker.take()

    assert [(lost.choice, lost.reason) for lost in sent.lost] == [(1, "drain"), (2, "drain")]
    assert sent.ids == truth()
    worker.assert_empty()


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


def test_a_prompt_beside_a_stream_is_paced_by_what_steps_took() -> None:
    """Told the time of its steps, a core gives a prompt as many ids as a running stream can spare;
    with nobody running, whole chunks.
    """
    worker = Worker(slowdown_max=2, lease_s=1e9)
    sizes = []
    worker.run(prompt_ids=pack_ids(range(320)), sampling=SamplingParams(max_tokens=60))
    while batch := worker.core.plan():
        sizes.append([row.num_tokens for row in batch])
        worker.core.took(batch, 0.010 + 0.001 * sum(sizes[-1]))
        worker.core.finish(batch, worker.core.execute(batch), worker.now)
        if len(sizes) == 20:
            worker.run(choice=1, prompt_ids=pack_ids(range(500, 800)))

    assert sizes[:2] == [[256], [64]]
    beside = [chunks[1] for chunks in sizes if len(chunks) == 2 and chunks[1] > 1]
    assert sum(beside) >= 300 - 16
    assert all(9 <= chunk <= 11 for chunk in beside[3:-1]), beside
