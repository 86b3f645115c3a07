"""What a mesh says of itself: exact counts, every service by name, and never a prompt."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import nats.errors
import pytest

from tests.mesh.cluster import Mesh

SECRET = "xylophone"
STREAMS = 8
TOKENS = 20


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with Mesh(tmp_path_factory.mktemp("seen"), "--engine", "sim") as running:
        yield running


async def stats(mesh: Mesh) -> dict[str, dict[str, int]]:
    """What each service answers to `$SRV.STATS`, as any NATS tool asks: its counts by instance."""
    client = await mesh.insider()
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    await client.publish("$SRV.STATS", b"", reply=inbox)
    services = {p["instance"] for p in mesh.processes() if p["name"] not in ("nats", "redis")}
    told: dict[str, dict[str, int]] = {}
    while services - told.keys():
        answer = json.loads((await answers.next_msg(timeout=10)).data)
        told[answer["id"]] = answer["endpoints"][0]["data"]
    await client.close()
    assert told.keys() == services
    return told


def sums(told: dict[str, dict[str, int]], role: str, name: str) -> int:
    return sum(
        counts.get(name, 0) for instance, counts in told.items() if instance.startswith(role)
    )


async def test_counts_are_exact(sim: Mesh) -> None:
    """`/metrics` and `$SRV.STATS` count what clients saw: requests, tokens, choices, refusals."""

    async def one(number: int) -> None:
        await sim.post(
            "/v1/completions",
            {"prompt": f"{SECRET} {number}", "max_tokens": TOKENS, "ignore_eos": True},
        )

    before, told = await sim.metrics(), await stats(sim)
    await asyncio.gather(*(one(number) for number in range(STREAMS)))
    assert (await sim.raw_post("/v1/completions", b"{"))[0] == 400
    await sim.quiet()
    after, tells = await sim.metrics(), await stats(sim)

    for name, count in {
        "vllm:request_success_total": STREAMS,
        "vllm:e2e_request_latency_seconds_count": STREAMS,
        "vllm:time_to_first_token_seconds_count": STREAMS,
        "vllm:inter_token_latency_seconds_count": STREAMS * (TOKENS - 1),
        "vllm:generation_tokens_total": STREAMS * TOKENS,
        "vllm:request_generation_tokens_sum": STREAMS * TOKENS,
    }.items():
        assert after[name] - before[name] == count, name
    for role, event, count in (
        ("gateway", "end_finished", STREAMS),
        ("tokenizer", "answered", STREAMS),
        ("gpu_worker", "engine_output_tokens", STREAMS * TOKENS),
        ("gpu_worker", "engine_legs_length", STREAMS),
    ):
        assert sums(tells, role, event) - sums(told, role, event) == count, event


async def test_outsiders_learn_nothing_of_the_services(sim: Mesh) -> None:
    """`$SRV` is answered inside the mesh only: it names every instance."""
    client = await sim.outsider()
    with pytest.raises((nats.errors.NoRespondersError, nats.errors.TimeoutError)):
        await client.request("$SRV.PING", b"", timeout=1)
    await client.close()


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "%b", "max_tokens": 2}',
        b'{"prompt": "%b",',
        b'{"prompt": "%b \xff"}',
        b'{"model": "%b", "prompt": "x"}',
        b'{"prompt": "x", "logit_bias": {"%b": 1}}',
        b'{"prompt": "x", "temperature": "%b"}',
        b'{"prompt": ["%b", 1]}',
        b'{"prompt": "%b", "max_tokens": 2, "stop": ["%b"], "cache_salt": "%b"}',
    ],
)
async def test_logs_hold_nothing_of_a_request(sim: Mesh, body: bytes) -> None:
    """Neither a good request nor a bad one leaves its words in any log."""
    await sim.raw_post("/v1/completions", body.replace(b"%b", SECRET.encode()))
    chat: dict[str, Any] = {"messages": [{"role": SECRET, "content": SECRET}]}
    await sim.raw_post("/v1/chat/completions", json.dumps(chat).encode())

    logs = sorted((sim.run_dir / "logs").glob("*.log*"))
    assert len(logs) >= 8
    assert [log.name for log in logs if SECRET in log.read_text(errors="replace")] == []
