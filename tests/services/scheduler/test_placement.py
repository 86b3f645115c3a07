"""A leg goes where its first id comes soonest, and never where it does not fit."""

from typing import Any

from msgspec.structs import replace

from services.scheduler.placement import (
    CROWD_TOKENS,
    OUTPUT_TOKENS_GUESS,
    Need,
    choose_detokenizer,
    choose_worker,
    need_of,
)
from services.scheduler.workers import Peer, Sent
from shared.ids import pack_ids
from shared.kv import BLOCK_SIZE, SHORT_SIZE, block_hashes
from shared.messages import Beat, BlocksChanged
from shared.sampling import SamplingParams
from tests.services.scheduler.rig import submit

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


def test_a_leg_that_drops_ids_needs_no_more_blocks_than_it_keeps() -> None:
    """However long it is: else it would block the line until a worker is empty."""
    need = NEED._replace(tokens=20_000)
    assert chosen(worker("a", load=1, free_blocks=99), need=need) == ""
    assert chosen(worker("a", load=1, free_blocks=99, leg_blocks_max=80), need=need) == "a"
    assert chosen(worker("a", load=1, free_blocks=79, leg_blocks_max=80), need=need) == ""


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


def holding(instance: str, *hashes: bytes, **fields: Any) -> Peer:
    """A worker whose L1 has the blocks of these hashes."""
    peer = worker(instance, total_blocks=100, **fields)
    added = b"".join(name[:SHORT_SIZE] for name in hashes)
    peer.prefixes.take(
        BlocksChanged(worker=instance, seq=0, added=added, whole=True), 100, 100, 0.0
    )
    return peer


PREFIX = block_hashes(range(40 * BLOCK_SIZE), b"salt")
CACHED = Need(640, 700, 800, block_hashes=b"".join(PREFIX))


def test_a_leg_goes_where_its_prefix_is() -> None:
    """The longest one that is held counts, against what waits there and the legs that run."""
    one, all_of_it = holding("a", *PREFIX[:1]), holding("b", *PREFIX)
    assert chosen(one, all_of_it, worker("c"), need=CACHED) == "b"
    busy = holding("b", *PREFIX, prefill_tokens_waiting=100, step_tokens=1000)
    assert chosen(one, busy, need=CACHED) == "b"
    busier = holding("b", *PREFIX, prefill_tokens_waiting=630, step_tokens=1000)
    assert chosen(one, busier, need=CACHED) == "a"
    behind_a_hole = holding("b", *PREFIX[1:])
    assert chosen(one, behind_a_hole, need=CACHED) == "a"


def test_a_hot_prefix_does_not_gather_everybody_at_one_worker() -> None:
    """With a leg more here and there it soon is cheaper to compute it once more elsewhere."""
    legs = {"a": 0, "b": 0}
    holders = {"a"}
    for _ in range(16):
        peers = [
            holding(name, *(PREFIX if name in holders else []), load=count, max_legs=64)
            for name, count in legs.items()
        ]
        name = chosen(*peers, need=CACHED)
        holders.add(name)
        legs[name] += 1
        assert max(legs.values()) - min(legs.values()) <= 640 / CROWD_TOKENS + 1
    assert legs == {"a": 8, "b": 8}


def test_among_busy_workers_a_prefix_counts_longer() -> None:
    """To compute it again would hold up all legs there."""
    for others, name in ((0, "b"), (9, "a")):
        workers = [holding("a", *PREFIX, load=others + 6), worker("b", load=others)]
        for peer in workers:
            peer.beat = replace(peer.beat, max_legs=64)
        assert chosen(*workers, need=CACHED) == name


def test_what_a_worker_holds_is_credit_there() -> None:
    """Up to twice the usual: the leg adds little to what waits, elsewhere it is computed again."""
    for waits, name in ((128, "b"), (255, "b"), (256, "a")):
        full = worker("a", load=1, prefill_tokens_waiting=100)
        holder = holding("b", *PREFIX, load=1, prefill_tokens_waiting=waits)
        assert chosen(full, holder, need=CACHED) == name
    holder = holding("b", *PREFIX[:1], load=1, prefill_tokens_waiting=143)
    assert chosen(holder, need=CACHED) == "b"
    assert chosen(holding("b", *PREFIX[:1], load=1, prefill_tokens_waiting=144), need=CACHED) == ""


def test_a_prefix_draws_no_leg_to_a_worker_that_may_not_have_it() -> None:
    """Room, health, suspects and a failure there come first."""
    full = holding("b", *PREFIX, load=8)
    assert chosen(worker("a", load=3), full, need=CACHED) == "a"
    draining = holding("b", *PREFIX, draining=True)
    assert chosen(worker("a"), draining, need=CACHED) == "a"
    assert chosen(worker("a"), holding("b", *PREFIX), need=CACHED._replace(avoid="b")) == "a"
    assert chosen(worker("a"), holding("b", *PREFIX, load=1), need=CACHED, alone=True) == "a"


def test_the_last_id_is_always_computed_and_scores_need_every_id() -> None:
    """A prompt that is held to its end has one id to compute; one whose logprobs are wanted all."""
    peer = holding("a", *PREFIX)
    assert CACHED.cached_tokens(peer) == 639
    assert CACHED._replace(prefill_tokens=1000).cached_tokens(peer) == 640
    scored = submit(
        block_hashes=CACHED.block_hashes,
        sampling=SamplingParams(max_tokens=1, prompt_logprobs=0),
    )
    assert need_of(scored).cached_tokens(peer) == 0
    assert need_of(replace(scored, output_ids=pack_ids([1]))).cached_tokens(peer) > 0


def test_a_need_keeps_room_for_some_output_and_counts_what_is_there() -> None:
    """A re-drive computes prompt and output again, and its limit does not grow."""
    need = need_of(
        submit(
            epoch=2,
            prompt_ids=pack_ids(range(30)),
            output_ids=pack_ids(range(10)),
            sampling=SamplingParams(max_tokens=1000),
        )
    )
    assert need == Need(40, 40 + OUTPUT_TOKENS_GUESS, 1030)
    assert need.blocks(worker("a").beat) == 11


def test_detokenizers_share_legs() -> None:
    """The one with the fewest legs, counting those on their way."""
    one, two = worker("a", role="detokenizer"), worker("b", role="detokenizer")
    one.send(Sent(("r", 0), 0.0, 0, 0))
    assert choose_detokenizer([one, two]) is two
    assert choose_detokenizer([]) is None
