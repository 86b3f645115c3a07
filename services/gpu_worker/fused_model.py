"""The compiled step behind `StepModel`."""

import torch

from services.gpu_worker.models.decoder import DecoderConfig
from services.gpu_worker.models.fused import FusedDecoder, Span
from services.gpu_worker.models.fused_weights import page_bytes
from services.gpu_worker.runner import Scheduled
from services.gpu_worker.scoring import Logits
from shared.kv import BLOCK_SIZE


class FusedModel:
    """See `StepModel`."""

    def __init__(self, decoder: FusedDecoder) -> None:
        self.decoder = decoder
        # A block is contiguous, all its layers together.
        self._blocks = decoder.pool.view(torch.uint8).flatten(1).numpy()

    def forward(self, batch: list[Scheduled]) -> None:
        self.decoder.forward([_span(row) for row in batch])

    def logits(self, rows: list[int], *, values: bool = True) -> Logits:
        return self.decoder.logits(rows, values=values)

    def clear(self, blocks: list[int]) -> None:
        for block in blocks:  # all by one index take twice as long
            self.decoder.pool[block].zero_()

    def read_block(self, block: int, into: memoryview) -> None:
        into[:] = self._blocks[block].data

    def write_block(self, block: int, data: memoryview) -> None:
        self._blocks[block].data[:] = data

    def seconds(self) -> dict[str, float]:
        return self.decoder.seconds()


def fused_block_bytes(config: DecoderConfig) -> int:
    """Size of one KV block over all layers."""
    return config.num_layers * config.num_kv_heads * page_bytes(config)


def _span(row: Scheduled) -> Span:
    sequence, start = row.sequence, row.sequence.num_computed_tokens
    dropped = sequence.num_dropped_blocks
    num_blocks = -(-(start + row.num_tokens) // BLOCK_SIZE) - dropped
    ids = sequence.ids_from(start, row.num_tokens)
    return Span(ids, start, sequence.block_table[:num_blocks], dropped)
