"""The seam between the engine core and what computes: the real model or the simulated one."""

from typing import TYPE_CHECKING, NamedTuple, Protocol

from msgspec import Struct

from services.gpu_worker.faults import Fault
from services.gpu_worker.kv_policy import FULL, KvPolicy
from services.gpu_worker.sequence import Score, Sequence
from shared.messages import TokenLogprobs

if TYPE_CHECKING:  # torch takes 2 s to import, and a simulated engine needs none of it
    from services.gpu_worker.scoring import Logits


class ModelSpec(Struct, frozen=True, kw_only=True):
    """What the core must know of a loaded model."""

    name: str
    vocab_size: int
    max_model_len: int  # prompt and output ids together
    num_blocks: int  # blocks in the KV pool; block 0 is an ordinary block
    block_size: int
    end_ids: frozenset[int]  # ids that end a leg unless `ignore_eos`
    block_bytes: int = 0  # K and V of one block over all layers; 0 = blocks cannot leave L1
    kv_dtype: str = ""  # of the values in it: bf16, fp32
    kv_fingerprint: bytes = b""  # 16 bytes: of all that the contents of a block depend on, but ids
    kv_policy: KvPolicy = FULL


class Scheduled(NamedTuple):
    """One row of a step: compute `num_tokens` ids of `sequence` from `num_computed_tokens` on.

    The block table already covers them. The row samples iff it reaches the last known id.
    """

    sequence: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        sequence = self.sequence
        return sequence.num_computed_tokens + self.num_tokens == sequence.num_tokens


class Outcome(NamedTuple):
    """What one row came to. `fault` set = this leg fails typed, the others go on."""

    token_id: int | None = None  # None = the row does not sample
    logprobs: TokenLogprobs | None = None
    scores: tuple[Score, ...] = ()  # of the prompt ids after `Sequence.to_score`
    fault: Fault = ""


class StepModel(Protocol):
    """What computes: torch, or the compiled step. Owns weights and KV blocks."""

    def forward(self, batch: list[Scheduled]) -> None:
        """Compute every id of `batch` and store its K and V."""

    def logits(self, rows: list[int], *, values: bool = True) -> "Logits":
        """Of some ids of the last `forward`, counted in its order; whether more is read of them
        than which is the best.
        """

    def clear(self, blocks: list[int]) -> None:
        """Set K and V of these blocks to zero."""

    def read_block(self, block: int, into: memoryview) -> None:
        """Copy K and V of a block out: `ModelSpec.block_bytes` bytes."""

    def write_block(self, block: int, data: memoryview) -> None:
        """Put back what `read_block` gave, here or in another process of the same fingerprint."""

    def seconds(self) -> dict[str, float]:
        """Time spent in each phase of the above since the start."""


class ModelRunner(Protocol):
    """Synchronous; one call at a time; owns weights, KV memory and sampling."""

    spec: ModelSpec

    def warm_up(self) -> None:
        """Run what makes the first real step slow."""

    def execute(self, batch: list[Scheduled]) -> list[Outcome]:
        """One step over mixed prefill chunks and decode rows; an outcome per row. Does not change
        any sequence, so a row can be repeated. Raises `MemoryError` where memory runs out.
        """

    def read_block(self, block: int, into: memoryview) -> None:
        """See `StepModel`."""

    def write_block(self, block: int, data: memoryview) -> None:
        """See `StepModel`."""

    def phase_bound_ms(self, batch: list[Scheduled]) -> int:
        """An upper bound for `execute(batch)`; past it the engine counts as hung."""

    def seconds(self) -> dict[str, float]:
        """Time spent in each phase of `execute` since the start."""
