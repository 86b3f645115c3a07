"""Which K and V a worker keeps when it does not keep all: the `kv_*` of its configuration.

A window is exact for a model that was trained with it, and costs others what lies before it; most
lose everything when their first tokens go, on which they rest the attention that they do not need.
With these as sinks a text goes on for ever in bounded memory (StreamingLLM, Xiao et al., 2023), but
what has left the window is forgotten. What such a worker computes of a leg depends on its ids and
the policy alone, not on chunks or company; so a leg that is driven again says the same.
"""

from msgspec import Struct

from shared.kv import BLOCK_SIZE

POSITIONS_MAX = 1 << 17  # of a leg whose memory is bounded: its ids travel with every re-drive


class KvPolicy(Struct, frozen=True):
    """See `FULL`."""

    window: int = 0  # tokens that a token sees at most, itself included; 0 = all
    sinks: int = 0  # first tokens that stay in sight, whole blocks
    step_tokens: int = 0  # that a leg is computed by at once

    @classmethod
    def of(cls, window: int, sinks: int, step_tokens: int) -> "KvPolicy":
        """With `sinks` rounded up to whole blocks."""
        return cls(window, -(-sinks // BLOCK_SIZE) * BLOCK_SIZE, step_tokens)

    def __str__(self) -> str:
        """As clients are told; "" = nothing is left out."""
        if not self.window:
            return ""
        return (
            f"sinks={self.sinks}, window={self.window}" if self.sinks else f"window={self.window}"
        )

    @property
    def lossy(self) -> bool:
        """Whether blocks are dropped: then they are private to their leg."""
        return self.window > 0

    @property
    def sink_blocks(self) -> int:
        return self.sinks // BLOCK_SIZE

    @property
    def blocks_max(self) -> int:
        """What a leg holds at most, however long it is: sinks, the window of the first id of a
        step, and its other ids, both with blocks in part at their ends.
        """
        assert self.lossy
        return self.sink_blocks + (self.window + self.step_tokens) // BLOCK_SIZE + 2

    def num_out_of_sight(self, num_computed: int) -> int:
        """Blocks behind the sinks that nobody will see any more when so many ids are computed."""
        if not self.lossy:
            return 0
        return max(0, (num_computed - self.window + 1) // BLOCK_SIZE - self.sink_blocks)


FULL = KvPolicy()
"""Keeps everything."""
