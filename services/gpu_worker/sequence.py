"""A leg as the engine sees it: its ids, how far they are computed, the blocks that hold them."""

from dataclasses import dataclass, field

from shared.kv import BlockHash
from shared.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output ids of one leg. The batcher owns `block_table` and the counters.

    `num_computed_tokens` ids have their K and V in the blocks of `block_table`; the id after them
    is the next input. Sampling position = len(output_ids).
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    salt: bytes = b""
    output_ids: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(
        default_factory=list
    )  # of full blocks, extended as ids come
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prefix found in L1 when first scheduled

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    def ids_from(self, start: int, count: int) -> list[int]:
        """`count` ids from position `start` of prompt and output taken together."""
        split = len(self.prompt_ids)
        if start + count <= split:
            return self.prompt_ids[start : start + count]
        if start >= split:
            return self.output_ids[start - split : start - split + count]
        return self.prompt_ids[start:] + self.output_ids[: start + count - split]
