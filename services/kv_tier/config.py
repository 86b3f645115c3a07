"""The `[kv_tier]` table of the cluster file."""

import random
from typing import Literal

from msgspec import Struct

from services.kv_tier.frame import Codec
from shared.breaker import Limits
from shared.config import AboveZero, Count

Admission = Literal["always", "second_use", "never"]
_JITTER = 0.1  # what was written at once does not expire at once


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one kv_tier process, and what L2 keeps for how long."""

    answer_s: AboveZero = 0.25  # a slower Redis is no cache: recompute is faster
    store_s: AboveZero = 1.0  # nobody waits for a write, but its slots are lent
    connect_s: AboveZero = 0.1  # a unix socket or the next rack
    connections: Count = 3  # to each server: two for lookups beside the one that writes
    max_lookups: Count = 64  # in hand at once; beyond it the answer is a miss
    max_stores: Count = 64  # waiting; beyond it the oldest is dropped
    max_store_mb: Count = 256  # in the slots of those
    max_workers: Count = 64  # whose memory is mapped
    breaker: Limits = Limits(failures=2, window_s=5.0)  # of each server; a failure costs a leg
    # up to `answer_s`, so five of them take longer than the usual second
    codec: Codec = (
        "raw"  # zstd is lossless and pays on slow networks; int8 is lossy: answers change
    )
    admission: Admission = "second_use"  # what is kept for `keep_s`, beyond `insure_s`
    insure_s: AboveZero = 120.0  # for a leg that goes on elsewhere
    keep_s: AboveZero = 3600.0  # for others with the same beginning

    def first_ms(self) -> int:
        """How long a block is kept that is new to L2."""
        return _jittered_ms(self.keep_s if self.admission == "always" else self.insure_s)

    def again_ms(self) -> int | None:
        """How long one is kept from its second use on; None = no longer than it was."""
        return None if self.admission == "never" else _jittered_ms(self.keep_s)

    def running_ms(self) -> int:
        """How long one is kept that a running leg would need again."""
        return _jittered_ms(self.insure_s)


def _jittered_ms(seconds: float) -> int:
    return max(1, round(1000 * seconds * random.uniform(1 - _JITTER, 1 + _JITTER)))  # noqa: S311
