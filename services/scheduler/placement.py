"""Which worker a leg goes to. Pure.

The cost of a place is the time until the leg's first id, in ids to be computed before it: those of
its prompt that the worker does not hold, those that wait there already, and a little for each leg
that runs. What a worker holds counts the less the fuller it is beside the emptiest one: a second
copy of a prefix is computed once, but in a crowd every id of every answer takes longer. So a prefix
that everybody asks for spreads, the sooner the emptier the others are: there its computation holds
up few. What a worker holds also makes room there for a leg that else would be computed elsewhere.
"""

from collections.abc import Iterable
from typing import NamedTuple

from services.scheduler.workers import Peer
from shared.ids import count_ids
from shared.messages import Beat, Submit

LEG_TOKENS = 8  # what a running leg costs its neighbours, in ids of prefill
OUTPUT_TOKENS_GUESS = 128  # output ids that room is kept for; most answers end before max_tokens
CROWD_TOKENS = OUTPUT_TOKENS_GUESS
"""What a leg more costs an answer to its end, in ids of prefill: a row that decodes takes about as
long as an id of a prompt. An id of a prompt holds up all legs of its worker, so it counts for each.
"""


class Need(NamedTuple):
    """What a leg asks of a worker."""

    prefill_tokens: int  # where nothing is cached
    tokens: int  # ids that room is kept for
    tokens_max: int  # prompt and output, if it runs to its limit
    avoid: str = ""  # a worker that is the last choice
    block_hashes: bytes = b""  # that a cache may answer for; the prompt's: output is only where it
    # was computed, and the leg goes back there without a choice

    def blocks(self, beat: Beat) -> int:
        """That it takes of the worker which says `beat`."""
        count = -(-self.tokens // beat.block_size) if beat.block_size else 0
        return min(count, beat.leg_blocks_max) if beat.leg_blocks_max else count

    def cached_tokens(self, worker: Peer) -> int:
        """Ids that `worker` need not compute, as far as known. The last id always is."""
        held = worker.prefixes.num_leading(self.block_hashes) * worker.beat.block_size
        return min(held, max(0, self.prefill_tokens - 1))


def need_of(submit: Submit) -> Need:
    """What `submit` asks of a worker."""
    prompt, output = count_ids(submit.prompt_ids), count_ids(submit.output_ids)
    remaining = max(0, submit.sampling.max_tokens - output)
    computes_all = submit.sampling.prompt_logprobs is not None and not output
    return Need(
        prefill_tokens=prompt + output,
        tokens=prompt + output + min(remaining, OUTPUT_TOKENS_GUESS),
        tokens_max=prompt + submit.sampling.max_tokens,
        avoid=submit.failed_worker,
        block_hashes=b"" if computes_all else submit.block_hashes,
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
    fewest = min((worker.num_legs for worker in fitting), default=0)
    return min(
        fitting,
        key=lambda w: (w.instance == need.avoid, _cost(w, need, fewest), w.instance),
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
        and _has_credit(worker, need, prefill_steps * beat.step_tokens)
        and need.blocks(beat) <= worker.free_blocks
    )


def _has_credit(worker: Peer, need: Need, credit: float) -> bool:
    """As much again at most for a prompt that the worker holds: it adds little to what waits."""
    waits = worker.prefill_tokens
    return waits < credit or waits < credit + min(credit, need.cached_tokens(worker))


def _cost(worker: Peer, need: Need, fewest: int) -> int:
    crowd = CROWD_TOKENS * (worker.num_legs - fewest) // (1 + fewest)
    missing = need.prefill_tokens - max(0, need.cached_tokens(worker) - crowd)
    return missing + worker.prefill_tokens + LEG_TOKENS * worker.num_legs
