"""What L2 may not change, and what it keeps: answers, and the work of a dead worker."""

import asyncio
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any, NamedTuple

from tests.chaos.asks import TURNS, Ask, conversations
from tests.kv.speed import prompt_of
from tests.mesh.cluster import Mesh
from tests.mesh.test_observability import stats, sums

AT_ONCE = 16
SMALL_L1 = "gpu_worker.num_blocks=320"  # of a worker: what 16 conversations need, and little more
CONTEXT = 2_900
TOKENS = 160
KILLED_AFTER = 100
POLL_S = 0.005


class Same(NamedTuple):
    """Answers of conversations with L2 and without."""

    conversations: int
    answers: int
    different: int
    l2_tokens: int  # that came from L2


class Resume(NamedTuple):
    """A stream whose worker was killed."""

    gap_s: float  # the longest wait from then on
    recomputed: int  # ids
    same: bool


async def same(folder: Path, count: int, turns: int, tokens: int) -> Same:
    """Conversations with the same instructions, across two workers in fp32, one turn after the
    other; every text and every probability.
    """
    asks = conversations(1, count * TURNS, tokens)
    chats = [asks[at : at + turns] for at in range(0, len(asks), TURNS)]
    told = []
    for name, setting in (("on", "gpu_worker.l2=true"), ("off", "gpu_worker.l2=false")):
        options = ("gpu_worker.dtype=fp32", "gpu_worker.replicas=2", SMALL_L1, setting)
        with Mesh(folder / name, *options) as mesh:
            free = asyncio.Semaphore(AT_ONCE)

            answers = await asyncio.gather(*(talk(mesh, chat, free) for chat in chats))
            told.append(list(itertools.chain(*answers)))
            if name == "on":
                l2_tokens = sums(await stats(mesh), "gpu_worker", "engine_l2_hit_tokens")
    different = sum(one != other for one, other in zip(*told, strict=True))
    return Same(count, len(told[0]), different, l2_tokens)


async def talk(mesh: Mesh, chat: list[Ask], free: asyncio.Semaphore) -> list[Any]:
    """The choice of each turn, with the probability of each token."""
    async with free:
        answers = [
            await mesh.post("/v1/chat/completions", turn.body | {"logprobs": True}) for turn in chat
        ]
    return [answer["choices"] for answer in answers]


async def resume(folder: Path, rounds: int) -> list[Resume]:
    """SIGKILL the worker of a stream with a long context, in the default precision."""
    with Mesh(folder, "gpu_worker.replicas=2", "redis.maxmemory_mb=1024") as mesh:
        return [await _resumed(mesh, number) for number in range(rounds)]


async def _resumed(mesh: Mesh, number: int) -> Resume:
    prompt, times = prompt_of(CONTEXT), list[float]()
    calm = await streamed(mesh, prompt, f"calm {number}", [])
    before = await stats(mesh)
    storm = asyncio.create_task(streamed(mesh, prompt, f"storm {number}", times))
    while len(times) < KILLED_AFTER and not storm.done():
        await asyncio.sleep(POLL_S)
    [victim] = [p for p in await asyncio.to_thread(mesh.processes, "gpu_worker") if p["load"]]
    killed = len(times)
    os.killpg(victim["pid"], signal.SIGKILL)
    text = await storm
    await mesh.all_ready(restarts=number + 1)
    after = await stats(mesh)
    [survivor] = [name for name in before.keys() & after.keys() if name.startswith("gpu_worker")]
    recomputed = "engine_recomputed_tokens"
    return Resume(
        gap_s=max(later - sooner for sooner, later in itertools.pairwise(times[killed - 1 :])),
        recomputed=after[survivor][recomputed] - before[survivor].get(recomputed, 0),
        same=text == calm,
    )


async def streamed(mesh: Mesh, prompt: list[int], salt: str, times: list[float]) -> str:
    """The text of one greedy stream; `times` gets the moment of each delivery."""
    async with mesh.client() as client:
        stream = await client.completions.create(
            model=mesh.model,
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "cache_salt": salt},
        )
        text = ""
        async for chunk in stream:
            times.append(time.perf_counter())
            text += "".join(choice.text for choice in chunk.choices)
    return text
