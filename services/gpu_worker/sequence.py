"""A leg as the engine sees it: its ids, how far they are computed, the blocks that hold them."""

from dataclasses import dataclass, field
from typing import NamedTuple

from shared.kv import BlockHash
from shared.messages import TokenLogprobs
from shared.sampling import SamplingParams


class Score(NamedTuple):
    """What the model thought of one prompt id, given those before it."""

    logprobs: TokenLogprobs
    rank: int  # 1 = the best


@dataclass(slots=True, eq=False)
class Sequence:
    """Prompt and output ids of one leg. The batcher owns `block_table`, the counters and `scores`.

    `num_computed_tokens` ids have their K and V in the blocks of `block_table`; the id after them
    is the next input. Sampling position = len(output_ids).
    """

    prompt_ids: list[int]
    sampling: SamplingParams
    salt: bytes = b""
    output_ids: list[int] = field(default_factory=list)
    # Of full blocks, extended as ids come.
    block_hashes: list[BlockHash] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_dropped_blocks: int = 0  # out of sight, behind those of sinks; not in `block_table`
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prefix found in L1 when first scheduled
    num_loaded_tokens: int = 0  # of them, what L2 had for this leg
    num_offered: int = 0  # leading blocks that L2 was offered
    private: bool = False  # a lossy policy computes it: its blocks are never named, so never shared
    scores: list[Score] | None = None  # of prompt ids 1, 2, ... so far; None = nobody asks

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def num_skippable(self) -> int:
        """Leading ids whose logits nobody needs, so that their K and V may come from a cache."""
        if self.scores is not None and len(self.scores) < len(self.prompt_ids) - 1:
            return len(self.scores)
        return self.num_tokens - 1

    def to_score(self, num_tokens: int) -> range:
        """Those of the next `num_tokens` positions whose logits score a prompt id, the one after
        them, that has no score yet.
        """
        if self.scores is None:
            return range(0)
        first = self.num_computed_tokens
        end = min(first + num_tokens, len(self.prompt_ids) - 1)
        return range(max(first, len(self.scores)), end)

    def ids_from(self, start: int, count: int) -> list[int]:
        """`count` ids from position `start` of prompt and output taken together."""
        split = len(self.prompt_ids)
        if start + count <= split:
            return self.prompt_ids[start : start + count]
        if start >= split:
            return self.output_ids[start - split : start - split + count]
        return self.prompt_ids[start:] + self.output_ids[: start + count - split]
