"""The `[kv_tier]` table of the cluster file."""

from msgspec import Struct

from shared.breaker import Limits
from shared.config import AboveZero, Count


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one kv_tier process."""

    answer_s: AboveZero = 0.25  # a slower Redis is no cache: recompute is faster
    connect_s: AboveZero = 0.1  # a unix socket or the next rack
    connections: Count = 4  # parallel GETs of big values beat one MGET
    max_lookups: Count = 64  # in hand at once; beyond it the answer is a miss
    breaker: Limits = Limits()
