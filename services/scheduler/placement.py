"""Which worker a leg goes to. Pure.

The cost of a place is the time until its first id, in ids to be computed before it. What a prefix
cache holds will lower `Need.prefill_tokens` per worker; until then a re-drive goes back to its
last worker, which may have it all.
"""

from collections.abc import Iterable
from typing import NamedTuple

from services.scheduler.workers import Peer
from shared.ids import count_ids
from shared.messages import Submit

LEG_TOKENS = 8  # what a running leg costs its neighbours, in ids of prefill
OUTPUT_TOKENS_GUESS = 128  # output ids that room is kept for; most answers end before max_tokens


class Need(NamedTuple):
    """What a leg asks of a worker."""

    prefill_tokens: int
    tokens: int  # ids that room is kept for
    tokens_max: int  # prompt and output, if it runs to its limit
    avoid: str = ""  # a worker that is the last choice

    def blocks(self, block_size: int) -> int:
        return -(-self.tokens // block_size) if block_size else 0


def need_of(submit: Submit) -> Need:
    """What `submit` asks of a worker that has none of it cached."""
    prompt, output = count_ids(submit.prompt_ids), count_ids(submit.output_ids)
    remaining = max(0, submit.sampling.max_tokens - output)
    return Need(
        prefill_tokens=prompt + output,
        tokens=prompt + output + min(remaining, OUTPUT_TOKENS_GUESS),
        tokens_max=prompt + submit.sampling.max_tokens,
        avoid=submit.failed_worker,
    )


def choose_worker(
    workers: Iterable[Peer], need: Need, prefill_steps: float, *, alone: bool = False
) -> Peer | None:
    """The cheapest worker with room, the one to avoid only if there is no other; for a suspect, one
    that is empty or has had only suspects.
    """
    fitting = [
        worker
        for worker in workers
        if worker.placeable
        and worker.alone is None
        and need.tokens_max <= worker.beat.max_model_len
        and (
            not worker.num_legs
            or ((worker.quarantine or not alone) and _has_room(worker, need, prefill_steps))
        )
    ]
    return min(
        fitting,
        key=lambda w: (w.instance == need.avoid, _cost(w, need), w.instance),
        default=None,
    )


def choose_detokenizer(detokenizers: Iterable[Peer]) -> Peer | None:
    """The one with the fewest legs."""
    ready = [peer for peer in detokenizers if peer.placeable]
    return min(ready, key=lambda peer: (peer.num_legs, peer.instance), default=None)


def _has_room(worker: Peer, need: Need, prefill_steps: float) -> bool:
    """Room beside what it has: a leg, its blocks, and credit for prefill."""
    beat = worker.beat
    return (
        (not beat.max_legs or worker.num_legs < beat.max_legs)
        and worker.prefill_tokens < prefill_steps * beat.step_tokens
        and need.blocks(beat.block_size) <= worker.free_blocks
    )


def _cost(worker: Peer, need: Need) -> int:
    return need.prefill_tokens + worker.prefill_tokens + LEG_TOKENS * worker.num_legs
