"""Settings of a scheduler: the `[scheduler]` table of cluster.toml."""

from msgspec import Struct


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit of one pool's scheduler, with its unit and why it has that value."""

    queued_legs_max: int = (
        4096  # waiting for a worker; new legs beyond are refused, never re-drives
    )
    no_worker_s: float = 30.0  # a pool without workers for so long refuses; > a worker's restart
    aging_s: float = 10.0  # of waiting lifts a class by one, so that no class starves
    tenant_weights: dict[str, float] = {}  # fair share by tenant; 1.0 where not named
    prefill_steps: float = 2.0  # prefill kept waiting at a worker, so that it never idles for us
    runs_per_turn: int = 256  # placements before other messages get their turn
    lease_s: float = 5.0  # a leg whose gateway does not renew it for so long is forgotten
    tombstone_s: float = 60.0  # a late Submit of an ended epoch is known for so long
    tombstones_max: int = 65536  # legs

    def __post_init__(self) -> None:
        if self.queued_legs_max < 1 or self.runs_per_turn < 1 or self.tombstones_max < 1:
            raise ValueError("queued_legs_max, runs_per_turn, tombstones_max must be at least 1")
        if min(self.no_worker_s, self.aging_s, self.lease_s, self.tombstone_s) <= 0:
            raise ValueError("no_worker_s, aging_s, lease_s and tombstone_s must be above 0")
        if self.prefill_steps <= 0:
            raise ValueError("prefill_steps must be above 0")
        if any(weight <= 0 for weight in self.tenant_weights.values()):
            raise ValueError("tenant_weights must be above 0")
