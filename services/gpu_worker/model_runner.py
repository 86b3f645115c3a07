"""The real model behind the `ModelRunner` protocol: what is loaded, one step, its sampling."""

import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import NotRequired, TypedDict, Unpack

import msgspec
import torch

from kernels.cpu.library import BuildError, cpu_flags, library
from services.gpu_worker.fused_model import FusedModel, fused_block_bytes
from services.gpu_worker.kv_policy import FULL, POSITIONS_MAX, KvPolicy
from services.gpu_worker.loader import load_model
from services.gpu_worker.loader.fingerprint import compiled, in_torch, kv_fingerprint
from services.gpu_worker.loader.packed import NO_CACHE, PackedCache
from services.gpu_worker.loader.source import Source
from services.gpu_worker.models.decoder import Decoder, DecoderConfig
from services.gpu_worker.models.fused import FusedDecoder
from services.gpu_worker.models.fused_weights import pack_weights
from services.gpu_worker.runner import ModelSpec, Outcome, Scheduled, StepModel
from services.gpu_worker.sampler import Sampler, reads
from services.gpu_worker.scoring import score
from services.gpu_worker.sequence import Score, Sequence
from services.gpu_worker.torch_model import TorchModel, block_bytes
from shared.kv import BLOCK_SIZE
from shared.log import log
from shared.model_files import read_model
from shared.sampling import SamplingParams

SCORE_TILE = 32  # prompt ids whose logits are in memory at once: 6 MB of 49,152 ids
_WARM_UP_TOKENS = 64
_BOUND_FACTOR = 20  # a step on a machine with ten other busy processes is slow, not hung
_BOUND_MIN_MS = 5_000
_BOUND_COLD_MS = 60_000  # before `warm_up` has measured


class RunnerSettings(TypedDict):
    """How to run a model; the fields of the worker's configuration that are the runner's."""

    dtype: str  # "fp32", "bf16" or "auto", see `compute_dtype`
    quantize: str  # "none", "w8a8" or "auto", see `computes_int8`
    num_blocks: int | None  # of the KV pool; None = what fits kv_bytes_max
    kv_bytes_max: int
    max_model_len: int | None  # None = what the model was trained for, if the pool holds it
    num_threads: int  # of torch
    step_threads: int  # of the compiled step
    kv_dtype: NotRequired[str]  # "auto", "bf16" or "int8"
    kv_policy: NotRequired[KvPolicy]


def load_runner(
    path: Path,
    *,
    progress: Callable[[str], None],
    cache: PackedCache = NO_CACHE,
    **settings: Unpack[RunnerSettings],
) -> "DecoderRunner":
    """Load the model at `path` (GGUF file or Hugging Face directory) and allocate its KV pool. What
    int8 packs of it is taken from `cache`, and kept there.

    Raises `ModelFileError` for the files, `ValueError` naming the setting that does not fit.
    """
    torch.set_num_threads(settings["num_threads"])
    dtype = compute_dtype(settings["dtype"])
    progress("reading metadata")
    files = read_model(path)
    progress("building kernels")
    int8 = computes_int8(settings)
    precision = "int8" if int8 else str(dtype).removeprefix("torch.")
    progress(f"loading weights as {precision}")
    source = Source.of(path)
    config, weights = load_model(path, torch.float32 if int8 else dtype)
    policy = settings.get("kv_policy", FULL)
    config = with_policy(config, policy, settings.get("kv_dtype", "auto"))
    size = fused_block_bytes(config) if int8 else block_bytes(config, dtype)
    num_blocks = settings["num_blocks"]
    if num_blocks is None:
        num_blocks = settings["kv_bytes_max"] // size
    longest = _max_model_len(config.context_length, num_blocks, settings)
    model: StepModel
    if int8:
        arrays = cache.load(source, lambda: pack_weights(config, weights))
        model = FusedModel(
            FusedDecoder(config, arrays, longest, num_blocks, settings["step_threads"])
        )
        computes = compiled()
    else:
        model = TorchModel(Decoder(config, weights, longest), num_blocks)
        computes = in_torch(precision, settings["num_threads"])
    spec = ModelSpec(
        name=files.name,
        vocab_size=config.vocab_size,
        max_model_len=longest,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        end_ids=files.end_ids,
        block_bytes=size,
        kv_dtype=_kv_dtype_name(config, precision),
        kv_fingerprint=kv_fingerprint(source, config, computes),
        kv_policy=policy,
    )
    return DecoderRunner(model, spec)


def _kv_dtype_name(config: DecoderConfig, precision: str) -> str:
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "fp32" if precision == "float32" else "bf16"


def with_policy(config: DecoderConfig, policy: KvPolicy, kv_dtype: str) -> DecoderConfig:
    """The model as a worker that was told so computes it."""
    told = {"kv_dtype": kv_dtype, "kv_window": policy.window, "kv_sinks": policy.sinks}
    return msgspec.structs.replace(config, **told)


def computes_int8(settings: RunnerSettings) -> bool:
    """Whether the compiled step computes. Raises `ValueError` where it was asked for in vain.

    "auto" is a rule, not a measurement, so that all workers of a pool agree: int8 where a dtype was
    not asked for and the processor has dot instructions for it.
    """
    asked = settings["quantize"]
    if asked not in ("auto", "none", "w8a8"):
        raise ValueError(f"quantize: {asked!r} is not one of auto, none, w8a8")
    by_rule = settings["dtype"] == "auto" and b"avx512_vnni" in cpu_flags()
    if asked == "none" or (asked == "auto" and not by_rule):
        return False
    try:
        library()
    except BuildError as error:
        if asked == "w8a8":
            raise ValueError(f"quantize: {error}") from error
        log.warning("no_compiled_step", error=str(error))
        return False
    return True


def _max_model_len(trained: int, num_blocks: int, settings: RunnerSettings) -> int:
    longest = min(trained, num_blocks * BLOCK_SIZE)
    if longest < 1:
        raise ValueError(f"kv_bytes_max: {settings['kv_bytes_max']} bytes hold no block of KV")
    policy = settings.get("kv_policy", FULL)
    if policy.lossy:
        return _len_of_bounded(trained, num_blocks, policy, settings["max_model_len"])
    asked = settings["max_model_len"]
    if asked is not None and not 1 <= asked <= longest:
        raise ValueError(
            f"max_model_len: {asked}, but the model was trained for {trained} and the KV pool "
            f"holds {num_blocks * BLOCK_SIZE} tokens"
        )
    return longest if asked is None else asked


def _len_of_bounded(trained: int, num_blocks: int, policy: KvPolicy, asked: int | None) -> int:
    """Ids of a leg whose memory does not grow: with sinks more than the model was trained for."""
    if policy.sinks + policy.window > trained:
        raise ValueError(
            f"kv_window: {policy.window} ids, {policy.sinks} of sinks: the model was trained for "
            f"{trained}"
        )
    if policy.blocks_max > num_blocks:
        raise ValueError(
            f"kv_window: a leg takes {policy.blocks_max} blocks, but the KV pool has {num_blocks}"
        )
    longest = POSITIONS_MAX if policy.sinks else trained
    if asked is not None and not 1 <= asked <= longest:
        raise ValueError(f"max_model_len: {asked}, but under kv_policy at most {longest}")
    return longest if asked is None else asked


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


def _is_out_of_memory(error: RuntimeError) -> bool:
    """The CPU's allocator has no type of its own for it."""
    words = ("can't allocate memory", "not enough memory")  # Linux, Windows
    return isinstance(error, torch.OutOfMemoryError) or any(w in str(error) for w in words)


class DecoderRunner:
    """Runs steps of one model; see `ModelRunner`."""

    def __init__(self, model: StepModel, spec: ModelSpec) -> None:
        self.spec = spec
        self.model = model
        self._sampler = Sampler(spec.end_ids)
        self._step_ms = 0.0  # measured by `warm_up`: a step of one row, and a further token
        self._token_ms = 0.0
        self._sampling_s = 0.0

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

    def seconds(self) -> dict[str, float]:
        """See `ModelRunner`."""
        return {**self.model.seconds(), "sampling": self._sampling_s}

    def read_block(self, block: int, into: memoryview) -> None:
        """See `ModelRunner`."""
        self.model.read_block(block, into)

    def write_block(self, block: int, data: memoryview) -> None:
        """See `ModelRunner`."""
        self.model.write_block(block, data)

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
        if opened := _opened_blocks(batch):
            self.model.clear(opened)
        self.model.forward(batch)
        ends = [*accumulate(row.num_tokens for row in batch)]
        outcomes = [
            self._score(row, end - row.num_tokens) for row, end in zip(batch, ends, strict=True)
        ]
        sampling = [index for index, row in enumerate(batch) if row.samples]
        if sampling:
            sequences = [batch[index].sequence for index in sampling]
            rows = [ends[index] - 1 for index in sampling]
            logits = self.model.logits(rows, values=any(map(reads, sequences)))
            started = time.perf_counter()
            sampled = self._sampler.sample(logits, sequences)
            self._sampling_s += time.perf_counter() - started
            for index, outcome in zip(sampling, sampled, strict=True):
                if not outcomes[index].fault:
                    outcomes[index] = outcome._replace(scores=outcomes[index].scores)
        return outcomes

    def _score(self, row: Scheduled, begin: int) -> Outcome:
        """The scores that `row` owes; its ids are `begin`, ... of the batch."""
        sequence = row.sequence
        wanted = sequence.to_score(row.num_tokens)
        offset = begin - sequence.num_computed_tokens
        scores: list[Score] = []
        for start in range(wanted.start, wanted.stop, SCORE_TILE):
            stop = min(start + SCORE_TILE, wanted.stop)
            logits = self.model.logits([*range(offset + start, offset + stop)])
            if not all(logits.sound):
                return Outcome(fault="nan_logits")
            ids = sequence.prompt_ids[start + 1 : stop + 1]
            scores += score(logits.values, ids, sequence.sampling.prompt_logprobs or 0)
        return Outcome(scores=tuple(scores))


def _opened_blocks(batch: list[Scheduled]) -> list[int]:
    """Blocks that this step begins and does not fill, to be cleared: their free slots may hold NaN
    of an earlier leg, and 0 * NaN would reach this one.
    """
    opened = []
    for sequence, num_tokens in batch:
        start = sequence.num_computed_tokens
        last, filled = divmod(start + num_tokens, BLOCK_SIZE)
        if filled and start <= last * BLOCK_SIZE:
            opened.append(sequence.block_table[last - sequence.num_dropped_blocks])
    return opened
