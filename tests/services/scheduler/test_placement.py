"""A leg goes where its first id comes soonest, and never where it does not fit."""

from typing import Any

from services.scheduler.placement import (
    OUTPUT_TOKENS_GUESS,
    Need,
    choose_detokenizer,
    choose_worker,
    need_of,
)
from services.scheduler.workers import Peer, Sent
from shared.ids import pack_ids
from shared.messages import Beat, Submit
from shared.sampling import SamplingParams

NEED = Need(prefill_tokens=40, tokens=100, tokens_max=200)


def worker(instance: str, **fields: Any) -> Peer:
    defaults: dict[str, Any] = {
        "role": "gpu_worker",
        "seq": 1,
        "free_blocks": 100,
        "block_size": 16,
        "max_legs": 8,
        "max_model_len": 2048,
        "step_tokens": 64,
    }
    return Peer(Beat(instance=instance, **defaults | fields))


def chosen(*workers: Peer, need: Need = NEED, alone: bool = False) -> str:
    peer = choose_worker(workers, need, 2.0, alone=alone)
    return peer.instance if peer else ""


def test_the_emptier_worker_is_cheaper() -> None:
    """Prefill that waits and legs that run both stand before the new one's first id."""
    assert chosen(worker("a", load=3), worker("b")) == "b"
    assert chosen(worker("a", load=1, prefill_tokens_waiting=60), worker("b", load=2)) == "b"


def test_a_worker_that_failed_on_the_leg_is_the_last_choice() -> None:
    """Another one may do better, however busy; without one, the same is asked again."""
    need = NEED._replace(avoid="a")
    assert chosen(worker("a"), worker("b", load=7), need=need) == "b"
    assert chosen(worker("a"), worker("b", load=8), need=need) == "a"


def test_a_worker_without_credit_slots_or_blocks_gets_nothing() -> None:
    """At most two steps of prefill wait at a worker; beyond, the leg waits here."""
    assert chosen(worker("a", load=1, prefill_tokens_waiting=127)) == "a"
    assert chosen(worker("a", load=1, prefill_tokens_waiting=128)) == ""
    assert chosen(worker("a", load=8)) == ""
    assert chosen(worker("a", load=1, free_blocks=6)) == ""
    assert chosen(worker("a", load=1, free_blocks=7)) == "a"


def test_an_empty_worker_takes_whatever_its_context_can_hold() -> None:
    """Otherwise a large leg would wait for room that never comes."""
    assert chosen(worker("a", free_blocks=1)) == "a"
    assert chosen(worker("a", max_model_len=199)) == ""


def test_hung_draining_and_unready_workers_get_nothing() -> None:
    """They live, but nothing new goes there."""
    hung = worker("a")
    hung.hung = True
    assert chosen(hung, worker("b", draining=True), worker("c", ready=False)) == ""


def test_a_leg_that_runs_alone_gets_an_empty_worker_and_keeps_it() -> None:
    """A request that may kill its worker takes nobody along."""
    assert chosen(worker("a", load=1), alone=True) == ""
    taken = worker("a")
    assert chosen(taken, alone=True) == "a"
    taken.alone = ("r", 0)
    assert chosen(taken) == ""


def test_a_need_keeps_room_for_some_output_and_counts_what_is_there() -> None:
    """A re-drive computes prompt and output again, and its limit does not grow."""
    submit = Submit(
        request_id="r",
        choice=0,
        epoch=2,
        gateway="g",
        model="m",
        tenant="",
        prompt_ids=pack_ids(range(30)),
        output_ids=pack_ids(range(10)),
        sampling=SamplingParams(max_tokens=1000),
    )
    need = need_of(submit)
    assert need == Need(40, 40 + OUTPUT_TOKENS_GUESS, 1030)
    assert need.blocks(16) == 11


def test_detokenizers_share_legs() -> None:
    """The one with the fewest legs, counting those on their way."""
    one, two = worker("a", role="detokenizer"), worker("b", role="detokenizer")
    one.send(Sent(("r", 0), 0.0, 0, 0))
    assert choose_detokenizer([one, two]) is two
    assert choose_detokenizer([]) is None
