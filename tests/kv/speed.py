"""How fast L2 is, and what it costs; everything as a ratio of two things measured in turn."""

import asyncio
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from shared.kv import BLOCK_SIZE
from tests.bench.stream import Answer, ask
from tests.mesh.cluster import Mesh
from tests.mesh.test_observability import stats, sums

PRECISIONS = {
    "fp32": ("gpu_worker.dtype=fp32", "gpu_worker.quantize=none"),
    "bf16": ("gpu_worker.dtype=bf16", "gpu_worker.quantize=none"),
    "int8": ("gpu_worker.quantize=w8a8",),
}
ROOM = "redis.maxmemory_mb=3072"  # for all that a measurement writes
VOCABULARY = range(1000, 40000)
STREAMS = 32
DOWN_IDS = 512
SPARE_BLOCKS = 8


class Warm(NamedTuple):
    """Times to the first token of one prompt: computed, and loaded from L2."""

    computed_s: list[float]
    loaded_s: list[float]
    read_bytes: int  # by kv_tier, and how long that took it
    read_s: float

    @property
    def ratio(self) -> float:
        return min(self.loaded_s) / min(self.computed_s)


def prompt_of(count: int) -> list[int]:
    return random.choices(VOCABULARY, k=count)


async def one(mesh: Mesh, prompt: list[int], tokens: int, salt: str = "") -> Answer:
    """One greedy stream of so many tokens."""
    body: dict[str, Any] = {"model": mesh.model, "prompt": prompt, "max_tokens": tokens}
    body |= {"temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    body |= {"cache_salt": salt} if salt else {}
    return await ask(f"{mesh.base_url}/v1/completions", body)


async def first_token(folder: Path, precision: str, num_ids: int, rounds: int) -> Warm:
    """One prompt, in turn under a new salt (nothing of it is anywhere) and under its own (it is in
    L2). L1 has room for one of the two, so that it never helps.
    """
    blocks = f"gpu_worker.num_blocks={num_ids // BLOCK_SIZE + SPARE_BLOCKS}"
    prompt = prompt_of(num_ids)
    computed, loaded = [], []
    with Mesh(folder, *PRECISIONS[precision], blocks, ROOM) as mesh:
        await one(mesh, prompt, 1, "kept")
        before = await stats(mesh)
        for number in range(rounds):
            cold = await one(mesh, prompt, 1, f"new {number}")
            warm = await one(mesh, prompt, 1, "kept")
            assert cold.cached_tokens == 0, cold
            assert warm.cached_tokens > num_ids * 0.9, warm
            computed.append(cold.ttft_s)
            loaded.append(warm.ttft_s)
        after = await stats(mesh)
    read_bytes = sums(after, "kv_tier", "read_bytes") - sums(before, "kv_tier", "read_bytes")
    read_us = sums(after, "kv_tier", "load_us") - sums(before, "kv_tier", "load_us")
    return Warm(computed, loaded, read_bytes, read_us / 1e6)


async def tokens_per_s(mesh: Mesh) -> float:
    """Of 32 streams with nothing in common, 128 ids in and 128 out."""
    started = time.perf_counter()
    await asyncio.gather(*(one(mesh, prompt_of(128), 128) for _ in range(STREAMS)))
    return STREAMS * 128 / (time.perf_counter() - started)


async def cost(folder: Path, rounds: int) -> list[float]:
    """Tokens/s with L2 by those without it, round by round, in the default precision."""
    with Mesh(folder / "on", ROOM) as on, Mesh(folder / "off", "gpu_worker.l2=false") as off:
        for mesh in (on, off):
            await tokens_per_s(mesh)
        ratios = []
        for number in range(rounds):
            pair = (on, off) if number % 2 else (off, on)
            done = {mesh.run_dir: await tokens_per_s(mesh) for mesh in pair}
            ratios.append(done[on.run_dir] / done[off.run_dir])
    return ratios


async def redis_down(folder: Path, rounds: int, asks: int) -> tuple[float, float]:
    """The median time to the first token of new prompts while Redis is there, and while it is
    stopped, which is worse than away: whoever asks it waits.
    """
    there: list[float] = []
    stopped: list[float] = []
    with Mesh(folder) as mesh:
        await one(mesh, prompt_of(DOWN_IDS), 1)
        for _ in range(rounds):
            there += [(await one(mesh, prompt_of(DOWN_IDS), 1)).ttft_s for _ in range(asks)]
            assert mesh.shoal("pause", "redis").returncode == 0
            stopped += [(await one(mesh, prompt_of(DOWN_IDS), 1)).ttft_s for _ in range(asks)]
            assert mesh.shoal("resume", "redis").returncode == 0
    return statistics.median(there), statistics.median(stopped)
