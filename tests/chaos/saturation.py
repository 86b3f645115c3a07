"""Full load and no fault: whoever is only busy must not be taken for lost.

Each client asks again as soon as it is answered, and there are more of them than the mesh takes:
the queue is full all the time, most of the work is long prompts, and every CPU is busy.
"""

import asyncio
import random
import time
from collections import Counter

import openai

from tests.chaos.asks import sentence
from tests.chaos.site import Site

CLIENTS = 96
FULL_SOON = ("scheduler.queued_legs_max=16",)  # settings of the mesh: more are refused
LONG_SHARE = 0.5
LONG_WORDS = 4_600  # 6,000 tokens of the default model
SHORT_WORDS = 40
REST_S = 30.0
ALARMS = {
    "gateway": ("redrive_",),
    "scheduler": ("took_office", "stepped_down", "lost_", "lapsed"),
    "gpu_worker": ("legs_reaped", "legs_moved", "run_of_lower_term", "undecodable"),
    "detokenizer": ("lapsed", "late", "gap", "unknown_leg", "drain"),
}
"""What each role counts when it, or somebody, is held for lost."""


async def saturate(site: Site, minutes: float, seed: int) -> bool:
    """Print what was asked and which alarms were raised. Whether there were none, nobody failed,
    and the mesh was full indeed: some were refused. `site` has the settings `FULL_SOON`.
    """
    async with site:
        before = await alarms(site)
        counts: Counter[str] = Counter()
        until = time.monotonic() + minutes * 60
        async with site.mesh.client().with_options(timeout=600) as api:
            await asyncio.gather(
                *(
                    client(api, site.mesh.model, f"{seed}/{number}", until, counts)
                    for number in range(CLIENTS)
                )
            )
        raised = await alarms(site) - before
        left = await site.rest(None, REST_S)
    print(f"{CLIENTS} clients, {minutes:g} minutes: {dict(counts)}")
    print(f"alarms: {dict(raised) or 'none'}; held at rest: {', '.join(left) or 'nothing'}")
    known = {"finished", "refused", "prompt tokens", "tokens"}
    return counts.keys() == known and not raised and not left


async def client(
    api: openai.AsyncOpenAI, model: str, seed: str, until: float, counts: Counter[str]
) -> None:
    """Ask until the time is over; who is refused waits as long as it is told to."""
    rng = random.Random(seed)
    while time.monotonic() < until:
        words = LONG_WORDS if rng.random() < LONG_SHARE else SHORT_WORDS
        try:
            stream = await api.completions.create(
                model=model,
                prompt=f"{seed} {sentence(rng, words)}",
                max_tokens=rng.randint(16, 128),
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"ignore_eos": True},
            )
            async for chunk in stream:
                if chunk.usage:
                    counts["prompt tokens"] += chunk.usage.prompt_tokens
                    counts["tokens"] += chunk.usage.completion_tokens
            counts["finished"] += 1
        except openai.RateLimitError as error:
            counts["refused"] += 1
            await asyncio.sleep(float(error.response.headers["Retry-After"]))
        except openai.APIError as error:
            counts[f"failed: {error}"] += 1


async def alarms(site: Site) -> Counter[str]:
    """All alarms so far, by role and name."""
    found: Counter[str] = Counter()
    for role, names in ALARMS.items():
        for name, count in (await site.counters(role)).items():
            if name.startswith(names):
                found[f"{role} {name}"] += count
    found["restarts"] = sum(process.restarts for process in await site.status())
    return found
