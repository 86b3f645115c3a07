"""A stored request outlives any one process: its gateway too."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import Adopted, Ended, Event, Output, Submitted
from services.gateway.stored.store import Store
from shared.client import Client
from shared.nats_bus import NatsBus
from tests.mesh.cluster import Mesh

TOKENS = 150  # at 20 ms: three seconds, in which something can happen


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """Two gateways, quick to go, before a simulated worker that takes its time."""
    options = ("gateway.replicas=2", "gateway.drain_s=0.3", "gpu_worker.sim.step_ms=20")
    with Mesh(tmp_path_factory.mktemp("stored"), "--engine", "sim", *options) as running:
        yield running


@pytest.fixture
async def outside(mesh: Mesh) -> AsyncIterator[Client]:
    bus = await mesh.outside_bus()
    yield Client(bus, model=mesh.model)
    await bus.close()


@pytest.fixture
async def store(mesh: Mesh) -> AsyncIterator[Store]:
    """The logs, as a gateway reads them."""
    launch = json.loads((mesh.run_dir / "launch" / "gateway-0.json").read_text())
    bus = await NatsBus.connect(
        launch["nats_url"], launch["nats_user"], launch["nats_password"], name="test"
    )
    yield Store(bus, StoredConfig())
    await bus.close()


async def submit(outside: Client, number: int = 0) -> str:
    return await outside.submit(
        "completions",
        prompt=f"Story number {number}.",
        max_tokens=TOKENS,
        temperature=0,
        ignore_eos=True,
    )


async def text(outside: Client, request_id: str) -> str:
    chunks = [chunk async for chunk in outside.follow(request_id)]
    assert [c["choices"][0]["finish_reason"] for c in chunks][-1] == "length"
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


async def under_way(store: Store, request_id: str, adoptions: int = 1) -> str:
    """Wait until whoever adopted it last has logged some of it; the name of its process."""
    adopted, name = 0, ""
    async for logged in store.follow(request_id, ""):
        if isinstance(logged.event, Adopted):
            adopted, name = adopted + 1, logged.event.gateway.rpartition("-")[0]
        if isinstance(logged.event, Output) and adopted == adoptions:
            return name
    raise AssertionError("it ended before")


async def events(store: Store, request_id: str) -> list[Event]:
    """The whole log, checked: one beginning, one end, every id once."""
    log = [logged.event async for logged in store.follow(request_id, "")]
    assert [type(event) for event in log].count(Submitted) == 1
    assert [event for event in log if isinstance(event, Ended)] == log[-1:]
    assert log[-1] == Ended(
        prompt_tokens=log[-1].prompt_tokens,  # type: ignore[union-attr]
        completion_tokens=TOKENS,
        cached_tokens=log[-1].cached_tokens,  # type: ignore[union-attr]
    )
    ends = [piece for event in log if isinstance(event, Output) for piece in event.pieces]
    assert [p.index for p in ends] == [0, *(p.index + len(p.ids) // 4 for p in ends[:-1])]
    return log


def pids(mesh: Mesh) -> dict[str, int]:
    """Asked for before anything runs: the answer takes as long as a request does."""
    return {process["name"]: int(process["pid"]) for process in mesh.processes()}


async def stats(mesh: Mesh, name: str) -> dict[str, Any]:
    """The counters of one process."""
    client = await mesh.insider()
    inbox = client.new_inbox()
    answers = await client.subscribe(inbox)
    await client.publish("$SRV.STATS", b"", reply=inbox)
    try:
        while True:
            told = json.loads((await answers.next_msg(timeout=10)).data)
            counters: dict[str, Any] = told["endpoints"][0]["data"]
            if told["id"].startswith(name):
                return counters
    finally:
        await client.close()


async def test_the_gateway_that_runs_it_is_killed(
    mesh: Mesh, outside: Client, store: Store
) -> None:
    """SIGKILL mid-answer: another gateway goes on from the log, and every reader has the text of a
    calm run, each id once.
    """
    calm = await text(outside, await submit(outside, 1))
    restarts, before = mesh.restarts(), pids(mesh)
    request_id = await submit(outside, 1)
    readers = [asyncio.create_task(text(outside, request_id)) for _ in range(4)]
    os.kill(before[await under_way(store, request_id)], signal.SIGKILL)
    assert await asyncio.gather(*readers) == [calm] * 4
    log = await events(store, request_id)
    assert len([event for event in log if isinstance(event, Adopted)]) == 2
    await mesh.all_ready(restarts + 1)
    await mesh.quiet()


async def test_the_gateway_that_runs_it_sleeps(mesh: Mesh, outside: Client, store: Store) -> None:
    """SIGSTOP until another has adopted it, then SIGCONT: the sleeper finds itself fenced, which
    is counted, and the log is that of one gateway at a time.
    """
    calm = await text(outside, await submit(outside, 2))
    before = pids(mesh)
    request_id = await submit(outside, 2)
    name = await under_way(store, request_id)
    sleeper = before[name]
    os.kill(sleeper, signal.SIGSTOP)
    try:
        await under_way(store, request_id, adoptions=2)
    finally:
        os.kill(sleeper, signal.SIGCONT)
    log = await events(store, request_id)
    adopters = [event.gateway.rpartition("-")[0] for event in log if isinstance(event, Adopted)]
    assert adopters[0] == name
    assert len(set(adopters)) == 2
    assert await text(outside, request_id) == calm
    assert pids(mesh)[name] == sleeper, "nobody has restarted it"
    async with asyncio.timeout(10):
        while not (await stats(mesh, name)).get("stored_fenced"):
            await asyncio.sleep(0.05)
    await mesh.quiet()


async def test_nats_restarts(mesh: Mesh, outside: Client, store: Store) -> None:
    """The server that holds the log and the queue dies mid-answer: the same text, one end."""
    calm = await text(outside, await submit(outside, 3))
    restarts, before = mesh.restarts(), pids(mesh)
    request_id = await submit(outside, 3)
    reader = asyncio.create_task(text(outside, request_id))
    await under_way(store, request_id)
    os.kill(before["nats"], signal.SIGKILL)
    assert await reader == calm
    await mesh.all_ready(restarts + 1)
    await events(store, request_id)
    await mesh.quiet()


async def test_a_gateway_that_stops_hands_over(mesh: Mesh, outside: Client, store: Store) -> None:
    """SIGTERM mid-answer: what it cannot finish in its time is another's at once."""
    calm = await text(outside, await submit(outside, 4))
    restarts, before = mesh.restarts(), pids(mesh)
    request_id = await submit(outside, 4)
    os.kill(before[await under_way(store, request_id)], signal.SIGTERM)
    assert await text(outside, request_id) == calm
    log = await events(store, request_id)
    assert len([event for event in log if isinstance(event, Adopted)]) == 2
    await mesh.all_ready(restarts + 1)
    await mesh.quiet()
