"""The decoder in torch behind `StepModel`: its KV pool, and a batch as the tensors it takes."""

import time
from itertools import accumulate, chain
from typing import NamedTuple

import torch

from kernels.paged_attention import SCALE_BYTES, AttentionGroup, Sight
from services.gpu_worker.models.decoder import Decoder, DecoderConfig, StepInput
from services.gpu_worker.runner import Scheduled
from services.gpu_worker.scoring import Logits
from services.gpu_worker.sequence import Sequence
from shared.kv import BLOCK_SIZE

QUERY_TILE = 128  # prompt tokens whose scores are in memory at once: 9 heads x 8k context = 38 MB


class _Piece(NamedTuple):
    """Ids [start, stop) of one row of the batch: what one attention group takes of it."""

    row: int
    sequence: Sequence
    start: int
    stop: int

    @property
    def num_blocks(self) -> int:
        """Blocks of everything up to these ids."""
        return -(-self.stop // BLOCK_SIZE)

    def blocks(self, first: int, kept: int) -> list[int]:
        """Those from `first` on. In the place of one that was dropped, behind the first `kept`,
        stands another of the sequence: whatever is in it is hidden.
        """
        table, dropped = self.sequence.block_table, self.sequence.num_dropped_blocks
        if not dropped:
            return table[first : self.num_blocks]
        wanted = range(first, self.num_blocks)
        return [table[i if i < kept else max(i - dropped, kept)] for i in wanted]


class TorchModel:
    """See `StepModel`."""

    def __init__(self, decoder: Decoder, num_blocks: int) -> None:
        config = decoder.config
        self._decoder = decoder
        self._sights = {kind.sight for kind in config.kinds}
        # Zeros, because slots that are hidden from a row still take part with weight 0.
        self.pool = torch.zeros(
            config.num_layers,
            2,
            config.num_kv_heads,
            num_blocks,
            BLOCK_SIZE,
            config.head_dim + (SCALE_BYTES if config.kv_int8 else 0),
            dtype=kv_dtype_of(config, decoder.dtype),
        )
        self._hidden = torch.empty(0)  # of the last step
        self._places: list[int] = []  # of each id of the batch among its rows
        self._seconds = {"layers": 0.0, "head": 0.0}

    def forward(self, batch: list[Scheduled]) -> None:
        groups = _grouped(batch, max(self._sights, key=lambda sight: sight.sinks))
        step, self._places = _assemble(groups, self._sights, batch)
        started = time.perf_counter()
        self._hidden = self._decoder.forward(step, self.pool)
        self._seconds["layers"] += time.perf_counter() - started

    def logits(self, rows: list[int], *, values: bool = True) -> Logits:  # noqa: ARG002 they are there
        places = [self._places[row] for row in rows]
        started = time.perf_counter()
        logits = Logits.of(self._decoder.logits(self._hidden[places]))
        self._seconds["head"] += time.perf_counter() - started
        return logits

    def seconds(self) -> dict[str, float]:
        return self._seconds

    def clear(self, blocks: list[int]) -> None:
        self.pool.index_fill_(3, torch.tensor(blocks), 0)

    def read_block(self, block: int, into: memoryview) -> None:
        part = self.pool[:, :, :, block]
        torch.frombuffer(into, dtype=part.dtype).view(part.shape).copy_(part)

    def write_block(self, block: int, data: memoryview) -> None:
        part = self.pool[:, :, :, block]
        part.copy_(torch.frombuffer(data, dtype=part.dtype).view(part.shape))


def kv_dtype_of(config: DecoderConfig, dtype: torch.dtype) -> torch.dtype:
    """What keys and values are kept in by a model that computes in `dtype`."""
    return {"auto": dtype, "bf16": torch.bfloat16, "int8": torch.int8}[config.kv_dtype]


def block_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Size of one KV block over all layers."""
    scale = SCALE_BYTES if config.kv_int8 else 0
    head = config.head_dim * kv_dtype_of(config, dtype).itemsize + scale
    return BLOCK_SIZE * config.num_layers * 2 * config.num_kv_heads * head


def _grouped(batch: list[Scheduled], sight: Sight) -> list[list[_Piece]]:
    """Pieces by attention group. Single ids go together with those of similar context, at most
    twice as long, since a group is padded to its longest, and as far from their sinks, if `sight`
    has any; a tile of a chunk goes alone.
    """
    singles: dict[tuple[int, bool], list[_Piece]] = {}
    tiles = []
    for row, (sequence, num_tokens) in enumerate(batch):
        end = sequence.num_computed_tokens + num_tokens
        for start in range(sequence.num_computed_tokens, end, QUERY_TILE):
            piece = _Piece(row, sequence, start, min(start + QUERY_TILE, end))
            if piece.stop - piece.start == 1:
                key = (piece.num_blocks.bit_length(), _apart(piece, sight))
                singles.setdefault(key, []).append(piece)
            else:
                tiles.append([piece])
    return [*singles.values(), *tiles]


def _apart(piece: _Piece, sight: Sight) -> bool:
    """Whether there is something between its sinks and what else it sees."""
    return sight.sinks > 0 and sight.first_block(piece.start, BLOCK_SIZE) > 0


def _assemble(
    groups: list[list[_Piece]], sights: set[Sight], batch: list[Scheduled]
) -> tuple[StepInput, list[int]]:
    """The step's tensors, and for each id of the batch, in its order, the step's row."""
    starts = [0, *accumulate(row.num_tokens for row in batch)]
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    places = [0] * starts[-1]
    for piece in chain.from_iterable(groups):
        taken = range(piece.start, piece.stop)
        table, dropped = piece.sequence.block_table, piece.sequence.num_dropped_blocks
        first = starts[piece.row] + piece.start - piece.sequence.num_computed_tokens
        places[first : first + len(taken)] = range(len(ids), len(ids) + len(taken))
        ids += piece.sequence.ids_from(piece.start, len(taken))
        positions += taken
        slots += [table[p // BLOCK_SIZE - dropped] * BLOCK_SIZE + p % BLOCK_SIZE for p in taken]
    step = StepInput(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        groups={sight: _attention_groups(groups, sight) for sight in sights},
    )
    return step, places


def _attention_groups(groups: list[list[_Piece]], sight: Sight) -> list[AttentionGroup]:
    window, sinks = sight
    kept = sinks // BLOCK_SIZE
    found = []
    begin = 0
    for group in groups:
        rows = group[0].stop - group[0].start
        apart = _apart(group[0], sight)
        firsts = [sight.first_block(piece.start, BLOCK_SIZE) for piece in group]
        tables = [piece.blocks(first, kept) for piece, first in zip(group, firsts, strict=True)]
        if apart:
            firsts = [first - kept for first in firsts]
            tables = [p.sequence.block_table[:kept] + t for p, t in zip(group, tables, strict=True)]
        width = max(map(len, tables))
        block_ids = []
        for table in tables:  # padded with a block of its own: no leg reads another's
            block_ids += table + table[-1:] * (width - len(table))
        # Positions count from the first gathered token.
        starts = [p.start - f * BLOCK_SIZE for p, f in zip(group, firsts, strict=True)]
        positions = (torch.tensor(starts)[:, None] + torch.arange(rows))[:, :, None, None]
        out_of_sight = window and max(starts) + rows > window
        shared = 0 if out_of_sight else min(starts)
        places = torch.arange(shared, width * BLOCK_SIZE)
        hidden = places > positions
        if out_of_sight:
            hidden |= (places >= sinks) & (places <= positions - window)
        found.append(
            AttentionGroup(
                start=begin,
                stop=begin + len(group) * rows,
                num_sequences=len(group),
                block_ids=torch.tensor(block_ids),
                shared=shared,
                hidden=hidden,
                sinks=sinks,
                apart=apart,
            )
        )
        begin = found[-1].stop
    return found
