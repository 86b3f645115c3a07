"""Blocks outlive their worker: nothing is said that would not be said without them, and little is
computed again.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import nats

from tests.chaos.asks import conversations
from tests.mesh.cluster import Mesh

SEED = int(os.environ.get("SEED", "1"))
LONG_IDS = 3000
BLOCKS = (LONG_IDS + 64) // 16  # in L2 before the worker dies
INSTRUCTIONS = 12  # blocks that conversations share
PATIENT = (  # a busy machine is no reason to compute what L2 has
    *("gpu_worker.l2_answer_s=10", "kv_tier.answer_s=10", "kv_tier.store_s=10"),
    *("gpu_worker.l2_min_blocks=0", "gpu_worker.l2_insure_ms=0", "gpu_worker.replicas=2"),
)
STORED = "engine_l2_stored_blocks"
RECOMPUTED_MAX = 64  # ids of a leg that goes on elsewhere


async def chats(mesh: Mesh, salt: str) -> list[dict[str, Any]]:
    """Turns of two conversations with the same instructions: text, finish, logprobs."""
    answers = await asyncio.gather(
        *(
            mesh.post("/v1/chat/completions", ask.body | {"cache_salt": salt, "logprobs": True})
            for ask in conversations(SEED, 5, 8)
        )
    )
    return [answer["choices"][0] for answer in answers]


async def test_blocks_of_a_dead_worker_change_no_answer(tmp_path: Path) -> None:
    """The real model in fp32: what was computed, what is loaded after the death of the worker that
    computed it, and what is computed without any cache agree in the last bit of each probability.
    """
    async with running(tmp_path, "gpu_worker.dtype=fp32") as (mesh, bus):
        workers = mesh.processes("gpu_worker")
        computed = await chats(mesh, "one")
        victim, other = await written(bus, workers, INSTRUCTIONS)
        os.killpg(victim["pid"], signal.SIGKILL)

        assert await chats(mesh, "one") == computed
        assert (await counts(bus, other))["engine_l2_hit_tokens"] > 0
        assert await chats(mesh, "two") == computed


async def test_a_long_stream_takes_its_blocks_along(tmp_path: Path) -> None:
    """SIGKILL the worker of a stream that holds thousands of ids: the other one computes but a few
    of them again, and the text is that of a calm run.
    """
    prompt = random.Random(SEED).choices(range(1000, 20000), k=LONG_IDS)
    body = {"prompt": prompt, "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    async with running(tmp_path, "--engine", "sim") as (mesh, bus):
        calm = await mesh.post("/v1/completions", body | {"cache_salt": "calm"})
        workers = mesh.processes("gpu_worker")
        before = {process["name"]: await counts(bus, process) for process in workers}
        stream = asyncio.create_task(mesh.post("/v1/completions", body | {"cache_salt": "storm"}))
        victim, other = await written(bus, workers, BLOCKS, before)
        os.killpg(victim["pid"], signal.SIGKILL)

        assert (await stream)["choices"][0]["text"] == calm["choices"][0]["text"]
        grown = await counts(bus, other) - before[other["name"]]
    assert grown["engine_l2_hit_tokens"] >= LONG_IDS
    assert 0 < grown["engine_recomputed_tokens"] <= RECOMPUTED_MAX


@contextlib.asynccontextmanager
async def running(run_dir: Path, *options: str) -> AsyncIterator[tuple[Mesh, nats.NATS]]:
    """A mesh of two workers, and its bus."""
    with Mesh(run_dir, *options, *PATIENT) as mesh:
        bus = await mesh.insider()
        try:
            yield mesh, bus
        finally:
            await bus.close()


async def counts(bus: nats.NATS, process: dict[str, Any]) -> Counter[str]:
    """What a worker has counted."""
    subject = f"$SRV.STATS.shoal-gpu-worker.{process['instance']}"
    answer = await bus.request(subject, b"", timeout=10)
    return Counter(json.loads(answer.data)["endpoints"][0]["data"])


async def written(
    bus: nats.NATS,
    workers: list[dict[str, Any]],
    blocks: int,
    before: dict[str, Counter[str]] | None = None,
) -> list[dict[str, Any]]:
    """The workers, first one of which so many blocks are in L2 that were not there `before`."""
    async with asyncio.timeout(60):
        while True:
            for process in workers:
                known = (before or {}).get(process["name"], Counter())[STORED]
                if (await counts(bus, process))[STORED] - known >= blocks:
                    return sorted(workers, key=lambda one: one is not process)
