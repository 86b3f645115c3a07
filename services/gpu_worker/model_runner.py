"""The real model behind the `ModelRunner` protocol: KV pool, batch assembly, forward, sampling."""

import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from kernels.paged_attention import AttentionGroup, first_block
from services.gpu_worker.loader import load_model
from services.gpu_worker.models.decoder import Decoder, DecoderConfig, StepInput
from services.gpu_worker.runner import ModelSpec, Outcome, Scheduled
from services.gpu_worker.sampler import Sampler
from services.gpu_worker.scoring import are_sound, score
from services.gpu_worker.sequence import Score, Sequence
from shared.kv import BLOCK_SIZE
from shared.model_files import read_model
from shared.sampling import SamplingParams

QUERY_TILE = 128  # prompt tokens whose scores are in memory at once: 9 heads x 8k context = 38 MB
SCORE_TILE = 32  # prompt ids whose logits are in memory at once: 6 MB of 49,152 ids
_WARM_UP_TOKENS = 64
_BOUND_FACTOR = 20  # a step on a machine with ten other busy processes is slow, not hung
_BOUND_MIN_MS = 5_000
_BOUND_COLD_MS = 60_000  # before `warm_up` has measured


class RunnerSettings(TypedDict):
    """How to run a model; the fields of the worker's configuration that are the runner's."""

    dtype: str  # "fp32", "bf16" or "auto", see `compute_dtype`
    num_blocks: int | None  # of the KV pool; None = what fits kv_bytes_max
    kv_bytes_max: int
    max_model_len: int | None  # None = what the model was trained for, if the pool holds it
    num_threads: int  # of the whole process


def load_runner(
    path: Path, *, progress: Callable[[str], None], **settings: Unpack[RunnerSettings]
) -> "DecoderRunner":
    """Load the model at `path` (GGUF file or Hugging Face directory) and allocate its KV pool.

    Raises `ModelFileError` for the files, `ValueError` naming the setting that does not fit.
    """
    torch.set_num_threads(settings["num_threads"])
    dtype = compute_dtype(settings["dtype"])
    progress("reading metadata")
    files = read_model(path)
    progress(f"loading weights as {str(dtype).removeprefix('torch.')}")
    config, weights = load_model(path, dtype)
    num_blocks = settings["num_blocks"]
    if num_blocks is None:
        num_blocks = settings["kv_bytes_max"] // block_bytes(config, dtype)
    longest = min(config.context_length, num_blocks * BLOCK_SIZE)
    if longest < 1:
        raise ValueError(f"kv_bytes_max: {settings['kv_bytes_max']} bytes hold no block of KV")
    max_model_len = longest if settings["max_model_len"] is None else settings["max_model_len"]
    if not 1 <= max_model_len <= longest:
        raise ValueError(
            f"max_model_len: {max_model_len}, but the model was trained for "
            f"{config.context_length} and the KV pool holds {num_blocks * BLOCK_SIZE} tokens"
        )
    model = Decoder(config, weights, max_model_len)
    spec = ModelSpec(
        name=files.name,
        vocab_size=config.vocab_size,
        max_model_len=max_model_len,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        end_ids=files.end_ids,
    )
    return DecoderRunner(model, spec)


def compute_dtype(name: str) -> torch.dtype:
    """What to compute in. "auto" is a rule, not a measurement, so that all workers of a pool agree:
    bf16 where the processor multiplies it (AVX512-BF16, AMX), else fp32.
    """
    if name == "auto":
        has = torch.cpu.get_capabilities()
        name = "bf16" if has.get("avx512_bf16") or has.get("amx_bf16") else "fp32"
    try:
        return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]
    except KeyError:
        raise ValueError(f"dtype: {name!r} is not one of auto, fp32, bf16") from None


def block_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """Size of one KV block over all layers."""
    per_token = config.num_layers * 2 * config.num_kv_heads * config.head_dim
    return BLOCK_SIZE * per_token * dtype.itemsize


def _is_out_of_memory(error: RuntimeError) -> bool:
    """The CPU's allocator has no type of its own for it."""
    words = ("can't allocate memory", "not enough memory")  # Linux, Windows
    return isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in words)


class _Piece(NamedTuple):
    """Ids [start, stop) of one row of the batch: what one attention group takes of it."""

    row: int
    sequence: Sequence
    start: int
    stop: int

    @property
    def blocks(self) -> list[int]:
        """Blocks of everything these ids may see."""
        return self.sequence.block_table[: -(-self.stop // BLOCK_SIZE)]


class DecoderRunner:
    """Runs steps of one model; see `ModelRunner`."""

    def __init__(self, model: Decoder, spec: ModelSpec) -> None:
        self.spec = spec
        self._model = model
        self._sampler = Sampler(spec.end_ids)
        config = model.config
        self._windows = {*config.windows}
        # Zeros, because slots that are hidden from a row still take part with weight 0.
        self._pool = torch.zeros(
            config.num_layers,
            2,
            config.num_kv_heads,
            spec.num_blocks,
            BLOCK_SIZE,
            config.head_dim,
            dtype=model.dtype,
        )
        self._step_ms = 0.0  # measured by `warm_up`: a step of one row, and a further token
        self._token_ms = 0.0

    def warm_up(self) -> None:
        """Prefill and decode in the first blocks of the pool; call it before the first step."""
        count = min(_WARM_UP_TOKENS, self.spec.max_model_len - 1)
        sequence = Sequence([0] * (count + 1), SamplingParams(max_tokens=1, temperature=0))
        sequence.block_table = [*range(count // BLOCK_SIZE + 1)]
        if count:
            self._timed_ms(Scheduled(sequence, count))
            self._token_ms = self._timed_ms(Scheduled(sequence, count)) / count
        sequence.num_computed_tokens = count
        self._timed_ms(Scheduled(sequence, 1))
        self._step_ms = self._timed_ms(Scheduled(sequence, 1))

    def _timed_ms(self, scheduled: Scheduled) -> float:
        start = time.perf_counter()
        self.execute([scheduled])
        return (time.perf_counter() - start) * 1000

    def phase_bound_ms(self, batch: list[Scheduled]) -> int:
        """See `ModelRunner`: the warm-up's speed, with a wide margin for a busy machine."""
        if not self._step_ms:
            return _BOUND_COLD_MS
        tokens = sum(scheduled.num_tokens for scheduled in batch)
        longest = max((scheduled.sequence.num_tokens for scheduled in batch), default=0)
        step_ms = self._step_ms + tokens * self._token_ms * (1 + longest / 1024)
        return max(_BOUND_MIN_MS, int(_BOUND_FACTOR * step_ms))

    def execute(self, batch: list[Scheduled]) -> list[Outcome]:
        """See `ModelRunner`."""
        assert batch
        try:
            with torch.inference_mode():
                return self._execute(batch)
        except RuntimeError as error:
            if _is_out_of_memory(error):
                raise MemoryError(str(error)) from error
            raise

    def _execute(self, batch: list[Scheduled]) -> list[Outcome]:
        self._clear_opened_blocks(batch)
        step, places = _assemble(_grouped(batch), self._windows, batch)
        hidden = self._model.forward(step, self._pool)
        outcomes = [self._score(row, hidden, places[index]) for index, row in enumerate(batch)]
        sampling = [index for index, row in enumerate(batch) if row.samples]
        if sampling:
            logits = self._model.logits(hidden[[places[index][-1] for index in sampling]])
            sampled = self._sampler.sample(logits, [batch[index].sequence for index in sampling])
            for index, outcome in zip(sampling, sampled, strict=True):
                if not outcomes[index].fault:
                    outcomes[index] = outcome._replace(scores=outcomes[index].scores)
        return outcomes

    def _score(self, row: Scheduled, hidden: Tensor, places: list[int]) -> Outcome:
        """The scores that `row` owes; `places` are the rows of `hidden` that hold its ids."""
        sequence = row.sequence
        wanted = sequence.to_score(row.num_tokens)
        first = sequence.num_computed_tokens
        scores: list[Score] = []
        for start in range(wanted.start, wanted.stop, SCORE_TILE):
            stop = min(start + SCORE_TILE, wanted.stop)
            logits = self._model.logits(hidden[places[start - first : stop - first]])
            if not are_sound(logits).all():
                return Outcome(fault="nan_logits")
            ids = sequence.prompt_ids[start + 1 : stop + 1]
            scores += score(logits, ids, sequence.sampling.prompt_logprobs or 0)
        return Outcome(scores=tuple(scores))

    def _clear_opened_blocks(self, batch: list[Scheduled]) -> None:
        """Zero the blocks that this step begins and does not fill: their free slots may hold NaN
        of an earlier leg, and 0 * NaN would reach this one.
        """
        opened = []
        for sequence, num_tokens in batch:
            start = sequence.num_computed_tokens
            last, filled = divmod(start + num_tokens, BLOCK_SIZE)
            if filled and start <= last * BLOCK_SIZE:
                opened.append(sequence.block_table[last])
        if opened:
            self._pool.index_fill_(3, torch.tensor(opened), 0)


def _grouped(batch: list[Scheduled]) -> list[list[_Piece]]:
    """Pieces by attention group. Single ids go together with those of similar context, at most
    twice as long, since a group is padded to its longest; a tile of a chunk goes alone.
    """
    singles: dict[int, list[_Piece]] = {}
    tiles = []
    for row, (sequence, num_tokens) in enumerate(batch):
        end = sequence.num_computed_tokens + num_tokens
        for start in range(sequence.num_computed_tokens, end, QUERY_TILE):
            piece = _Piece(row, sequence, start, min(start + QUERY_TILE, end))
            if piece.stop - piece.start == 1:
                singles.setdefault(len(piece.blocks).bit_length(), []).append(piece)
            else:
                tiles.append([piece])
    return [*singles.values(), *tiles]


def _assemble(
    groups: list[list[_Piece]], windows: set[int], batch: list[Scheduled]
) -> tuple[StepInput, list[list[int]]]:
    """The step's tensors, and for each row of the batch the step's rows that hold its ids."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    places: list[list[int]] = [[0] * row.num_tokens for row in batch]
    for piece in chain.from_iterable(groups):
        taken = range(piece.start, piece.stop)
        table = piece.sequence.block_table
        first = piece.start - piece.sequence.num_computed_tokens
        places[piece.row][first : first + len(taken)] = range(len(ids), len(ids) + len(taken))
        ids += piece.sequence.ids_from(piece.start, len(taken))
        positions += taken
        slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in taken]
    step = StepInput(
        ids=torch.tensor(ids),
        positions=torch.tensor(positions),
        slots=torch.tensor(slots),
        groups={window: _attention_groups(groups, window) for window in windows},
    )
    return step, places


def _attention_groups(groups: list[list[_Piece]], window: int) -> list[AttentionGroup]:
    found = []
    begin = 0
    for group in groups:
        rows = group[0].stop - group[0].start
        firsts = [first_block(piece.start, window, BLOCK_SIZE) for piece in group]
        tables = [piece.blocks[first:] for piece, first in zip(group, firsts, strict=True)]
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
            hidden |= places <= positions - window
        found.append(
            AttentionGroup(
                start=begin,
                stop=begin + len(group) * rows,
                num_sequences=len(group),
                block_ids=torch.tensor(block_ids),
                shared=shared,
                hidden=hidden,
            )
        )
        begin = found[-1].stop
    return found
