"""What is cached serves who may have it, at the worker that has it."""

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.mesh.cluster import Mesh

PROMPT = [7 + n % 300 for n in range(160)]
REUSABLE = 144  # of 160 ids: the last one is computed, and with it its block
BLOCKS = 10
SHARING = "shared_prefix = true"
KEYS = f'{{a = "a", b = "b", c = {{tenant = "c", {SHARING}}}, d = {{tenant = "d", {SHARING}}}}}'
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two simulated workers and four tenants, two of whom share prefixes."""
    options = ("gpu_worker.replicas=2", "gpu_worker.sim.step_ms=5", f"gateway.api_keys={KEYS}")
    with Mesh(tmp_path_factory.mktemp("prefixes"), "--engine", "sim", *options) as running:
        yield running


async def cached(mesh: Mesh, key: str, prompt: list[int], **fields: object) -> int:
    """How many ids of `prompt` were cached, as its answer says."""
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True, **fields}
    headers = {"Authorization": f"Bearer {key}"}
    status, answer = await mesh.raw_post("/v1/completions", json.dumps(body).encode(), headers)
    assert status == 200, answer
    return int(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])


async def seen(mesh: Mesh, name: str, at_least: float) -> dict[str, float]:
    """`/metrics`, once it says so: workers tell their counts once a second."""
    async with asyncio.timeout(15):
        while (metrics := await mesh.metrics()).get(name, 0) < at_least:
            await asyncio.sleep(0.02)
    return metrics


async def known(mesh: Mesh, blocks: int) -> None:
    """Wait until leader and standby know of so many blocks."""
    async with asyncio.timeout(15):
        while {p["extra"]["known_blocks"] for p in mesh.processes("scheduler")} != {blocks}:
            await asyncio.sleep(0.02)


async def test_a_prompt_goes_back_to_the_worker_that_has_it(shared: Mesh) -> None:
    """Though it went there only because the first choice, the other one when both are idle, was
    busy.
    """
    running = asyncio.create_task(cached(shared, "a", [5] * 20, max_tokens=61))
    await seen(shared, "vllm:num_requests_running", 1)
    assert await cached(shared, "a", PROMPT) == 0
    assert await running == 0
    await known(shared, BLOCKS + 5)
    assert await cached(shared, "a", PROMPT) == REUSABLE
    metrics = await seen(shared, QUERIES, 2 * len(PROMPT) + 20)
    assert metrics[HITS] == REUSABLE
    assert metrics["shoal:prefix_cache_hits_total"] == REUSABLE


async def test_tenants_share_what_their_keys_say_and_no_more(shared: Mesh) -> None:
    """A prompt is cached for its own tenant, for all that share if it shares, and within both only
    for the same `cache_salt`. Metrics add it up.
    """
    prompt, before = PROMPT[::-1], await shared.metrics()
    for salt in (None, "x"):
        assert [await cached(shared, key, prompt, cache_salt=salt) for key in "abc"] == [0, 0, 0]
    await known(shared, BLOCKS + 5 + 6 * BLOCKS)
    for salt in (None, "x"):
        again = [await cached(shared, key, prompt, cache_salt=salt) for key in "dabc"]
        assert again == 4 * [REUSABLE]
    after = await seen(shared, QUERIES, before[QUERIES] + 14 * len(prompt))
    assert after[HITS] - before[HITS] == 8 * REUSABLE
