"""Why a leg that is new to a pool is not taken. Pure."""

from services.scheduler.placement import Need
from services.scheduler.workers import Peers
from shared.errors import ContextLengthExceeded, MeshError, Overloaded

RETRY_AFTER_MAX_S = 60.0


def refusal_of(
    need: Need, peers: Peers, queued: int, queued_max: int, placed_per_s: float
) -> MeshError | None:
    """It fits no worker that is here, or too many wait before it; None = it may wait, too."""
    workers = [worker.beat for worker in peers.workers.values() if worker.beat.ready]
    longest = max((beat.max_model_len for beat in workers), default=need.tokens_max)
    if need.tokens_max > longest:
        return ContextLengthExceeded(
            f"the request needs {need.tokens_max} tokens; the largest worker holds {longest}.",
            param="max_tokens",
        )
    if queued >= queued_max:
        wait_s = queued / max(placed_per_s, 1.0)
        return Overloaded(
            "too many requests are waiting.",
            retry_after_s=min(max(1.0, round(wait_s)), RETRY_AFTER_MAX_S),
        )
    return None
