"""Take any one process away and the answer goes on."""

import asyncio
import os
import random
import signal

import openai

from tests.mesh.cluster import Mesh

SEED = int(os.environ.get("SEED", "1"))


async def answer(
    client: openai.AsyncOpenAI,
    model: str,
    number: int,
    tokens: int = 200,
    under_way: asyncio.Semaphore | None = None,
) -> str:
    """Stream one deterministic answer of exactly `tokens` ids; `under_way` is released once, when
    some of it has come.
    """
    stream = await client.completions.create(
        model=model,
        prompt=f"Story number {number}.",
        max_tokens=tokens,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, finishes, usage = "", [], None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.text
            if under_way is not None and len(text) > 50:
                under_way.release()
                under_way = None
            if choice.finish_reason:
                finishes.append(choice.finish_reason)
    assert finishes == ["length"]
    assert usage is not None
    assert usage.completion_tokens == tokens
    return text


async def begun(client: openai.AsyncOpenAI, model: str) -> list[asyncio.Task[str]]:
    """Eight answers, of each of which some has come."""
    under_way = asyncio.Semaphore(0)
    streams = [
        asyncio.create_task(answer(client, model, number, under_way=under_way))
        for number in range(8)
    ]
    for _ in streams:
        await under_way.acquire()
    return streams


async def test_worker_death_is_not_seen_by_clients(sim_mesh: Mesh) -> None:
    """SIGKILL one of two workers under 8 streams: all finish with the text of a calm run."""
    print(f"SEED={SEED}")
    async with sim_mesh.client() as client:
        calm = await asyncio.gather(*(answer(client, sim_mesh.model, n) for n in range(8)))
        victim = random.Random(SEED).choice(sim_mesh.processes("gpu_worker"))
        streams = await begun(client, sim_mesh.model)
        os.kill(victim["pid"], signal.SIGKILL)
        stormy = await asyncio.gather(*streams)

    assert stormy == calm
    await sim_mesh.all_ready(restarts=1)
    metrics = await sim_mesh.metrics()
    assert metrics["shoal:redrives_total"] > 0, "the fault hit nobody"
    await sim_mesh.quiet()


async def test_each_idle_process_killed_comes_back(sim_mesh: Mesh) -> None:
    """Kill each process in turn while nothing runs: it is restarted, and the next request works."""
    names = [process["name"] for process in sim_mesh.processes()]
    assert {name.rpartition("-")[0] or name for name in names} == {
        *("nats", "redis", "gateway", "tokenizer", "scheduler"),
        *("gpu_worker", "detokenizer", "kv_tier"),
    }
    async with sim_mesh.client() as client:
        before = await answer(client, sim_mesh.model, 1, tokens=20)
    for count, name in enumerate(names, 1):
        assert sim_mesh.shoal("kill", name).returncode == 0
        await sim_mesh.all_ready(restarts=count)
        async with sim_mesh.client() as client:
            assert await answer(client, sim_mesh.model, 1, tokens=20) == before, name
