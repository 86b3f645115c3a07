"""The deadline of a request binds in every phase, and its end is a typed 504."""

import asyncio
import json
from typing import Any

from tests.mesh.cluster import Mesh


async def ask(mesh: Mesh, timeout_ms: int, **body: Any) -> tuple[int, dict[str, Any]]:
    """One whole completion with `timeout_ms` to live."""
    status, answer = await mesh.raw_post(
        "/v1/completions",
        json.dumps({"model": mesh.model, "ignore_eos": True, **body}).encode(),
        {"X-Request-Timeout-Ms": str(timeout_ms)},
    )
    return status, json.loads(answer)


async def test_past_in_decode(mesh: Mesh) -> None:
    """A long answer is cut at its deadline."""
    status, answer = await ask(mesh, 1500, prompt="Once", max_tokens=8000)

    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    await mesh.quiet()


async def test_past_in_prefill(mesh: Mesh) -> None:
    """A long prompt is cut at its deadline, before any token."""
    status, answer = await ask(mesh, 300, prompt="word " * 6000, max_tokens=5)

    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    await mesh.quiet()


async def test_past_in_queue(sim_mesh_small: Mesh) -> None:
    """A request that waits behind others is cut at its deadline while they go on."""
    mesh = sim_mesh_small
    first = asyncio.create_task(ask(mesh, 60_000, prompt="a", max_tokens=300))
    async with asyncio.timeout(20):
        while (await mesh.metrics())["vllm:num_requests_running"] < 1:
            await asyncio.sleep(0.02)
    status, answer = await ask(mesh, 200, prompt="b", max_tokens=5)

    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
    assert (await first)[0] == 200
    await mesh.quiet()


async def test_past_in_tokenizer(sim_mesh_small: Mesh) -> None:
    """A request whose tokenizer does not answer is cut at its deadline."""
    mesh = sim_mesh_small
    assert mesh.shoal("pause", "tokenizer-0").returncode == 0
    status, answer = await ask(mesh, 200, prompt="c", max_tokens=5)
    assert mesh.shoal("resume", "tokenizer-0").returncode == 0

    assert (status, answer["error"]["code"]) == (504, "deadline_exceeded")
