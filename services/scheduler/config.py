"""Settings of a scheduler: the `[scheduler]` table of cluster.toml."""

from msgspec import Struct

from shared.config import AboveZero, Count, Natural


class SchedulerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit of one pool's scheduler, with its unit and why it has that value."""

    queued_legs_max: Count = 4096  # new legs beyond are refused, re-drives never
    no_worker_s: AboveZero = 30.0  # a pool without workers refuses then; > a worker's restart
    aging_s: AboveZero = 10.0  # of waiting lifts a class by one, so that no class starves
    tenant_weights: dict[str, AboveZero] = {}  # fair share by tenant; 1.0 where not named
    prefill_steps: AboveZero = 2.0  # of prefill kept waiting at a worker, so that it never idles
    known_blocks_max: Natural = 1 << 20  # cached at workers and known here, 0.1 KB each; 0 = none
    runs_per_turn: Count = 256  # placements before other messages get their turn
    lease_s: AboveZero = 5.0  # a leg whose gateway does not renew it for so long is forgotten
    tombstone_s: AboveZero = 60.0  # a late Submit of an ended epoch is known for so long
    tombstones_max: Count = 65536  # legs
