"""Take any one process away and the answer goes on."""

import asyncio
import os
import random
import signal

import openai

from shared.client import Client
from tests.mesh.cluster import Mesh
from tests.mesh.test_observability import stats, sums

BUS_STREAMS = 16
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


async def test_a_worker_that_wakes_finds_its_streams_elsewhere(sim_mesh: Mesh) -> None:
    """SIGSTOP a worker until its streams have gone on without it, then SIGCONT: what it still sends
    comes late, is counted and is dropped.
    """
    async with sim_mesh.client() as client:
        calm = await asyncio.gather(*(answer(client, sim_mesh.model, n) for n in range(8)))
        sleeper, other = sim_mesh.processes("gpu_worker")
        streams = await begun(client, sim_mesh.model)
        os.killpg(sleeper["pid"], signal.SIGSTOP)
        try:
            async with asyncio.timeout(15):
                while await load_of(sim_mesh, other["name"]) < len(streams):
                    await asyncio.sleep(0.05)
        finally:
            os.killpg(sleeper["pid"], signal.SIGCONT)
        assert await asyncio.gather(*streams) == calm
    assert sim_mesh.restarts() == 0
    told = await stats(sim_mesh)
    # Dropped by a detokenizer that knows of the others, or by the session itself.
    assert sums(told, "detokenizer", "late") + sums(told, "gateway", "dropped_text") > 0
    await sim_mesh.quiet()


async def load_of(mesh: Mesh, name: str) -> int:
    """Legs in its batch now."""
    [process] = await asyncio.to_thread(mesh.processes, name)
    load: int = process["load"]
    return load


async def test_streams_on_the_bus_outlive_the_bus(sim_mesh: Mesh) -> None:
    """NATS is killed and comes back under 16 streams over it: each has its whole text, once."""
    bus = await sim_mesh.outside_bus()
    under_way = asyncio.Semaphore(0)

    async def one(number: int) -> str:
        text = ""
        async for chunk in Client(bus, model=sim_mesh.model).complete(
            prompt=f"Story number {number}.", max_tokens=200, ignore_eos=True, temperature=0
        ):
            text += "".join(choice["text"] for choice in chunk["choices"])
            if chunk["choices"]:
                under_way.release()
        return text

    calm = await asyncio.gather(*map(one, range(BUS_STREAMS)))
    (nats_server,) = sim_mesh.processes("nats")
    under_way = asyncio.Semaphore(0)
    streams = [asyncio.create_task(one(number)) for number in range(BUS_STREAMS)]
    for _ in range(2 * BUS_STREAMS):
        await under_way.acquire()
    os.kill(nats_server["pid"], signal.SIGKILL)
    ended = sum(stream.done() for stream in streams)
    stormy = await asyncio.gather(*streams)
    await bus.close()

    assert ended == 0, "the fault came too late"
    assert stormy == calm
    await sim_mesh.all_ready(restarts=1)
    await sim_mesh.quiet()
