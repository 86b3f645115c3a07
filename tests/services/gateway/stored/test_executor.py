"""Stored requests, run by two gateways on a real JetStream before a played mesh."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.servers import Server, start, start_nats
from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import Adopted, Opened, Output
from services.gateway.stored.streams import JOBS, LOGS
from shared.client import Client
from shared.errors import NotFound, Unavailable
from shared.ids import count_ids
from shared.jetstream import StreamFull
from shared.subjects import stored
from shared.testing import eventually
from tests.services.gateway.fake_mesh import MODEL
from tests.services.gateway.stored.duo import (
    TEXT,
    Duo,
    chat,
    duo,
    ended,
    texts,
    whole,
)
from tests.services.gateway.stored.kit import R, follow, put, submitted


@pytest.fixture
async def pair(nats_server: Server) -> AsyncIterator[Duo]:
    async with duo(nats_server) as running:
        yield running


async def no_job_left(pair: Duo) -> None:
    """Every job was settled, and nothing of any session is left."""
    await eventually(lambda: all(g.executor.running == 0 for g in pair.gateways))
    await eventually(lambda: all(g.table.num_sessions == 0 for g in pair.gateways))
    jetstream = pair.store.jetstream
    async with asyncio.timeout(5):
        while (await jetstream.usage(JOBS)).messages:
            await asyncio.sleep(0.01)


async def test_a_stored_request_is_run_once(pair: Duo) -> None:
    """From submission to its end: the same answer as a stream, usage as counted, nothing left."""
    await pair.ask(chat(n=2, logprobs=True))
    log = await whole(pair)
    assert texts(log) == {0: TEXT, 1: f"{TEXT}#1"}
    end = ended(log)
    assert (end.code, end.prompt_tokens, end.completion_tokens) == ("", 2, 10)
    assert [type(event) for _, event in log[1:3]] == [Adopted, Opened]
    pieces = [p for _, e in log if isinstance(e, Output) for p in e.pieces]
    assert all(len(piece.logprobs or []) == count_ids(piece.ids) for piece in pieces)
    assert len(pair.mesh.generated) == 1
    await no_job_left(pair)


async def test_many_are_shared_by_all_gateways(pair: Duo) -> None:
    """100 at once, over both gateways: each is run once and right."""
    names = [f"{number:032x}" for number in range(100)]
    await asyncio.gather(*(pair.ask(chat(), name) for name in names))
    logs = await asyncio.gather(*(whole(pair, name) for name in names))
    assert [texts(log) for log in logs] == [{0: TEXT}] * 100
    assert pair.count("stored_adopted") == 100
    assert all(gateway.stats()["stored_adopted"] for gateway in pair.gateways)
    await no_job_left(pair)


async def test_a_gateway_that_stops_hands_over(pair: Duo) -> None:
    """It stops mid-answer: another goes on from the log at once, with higher epochs and the same
    parameters, and asks no tokenizer.
    """
    pair.mesh.script.stuck_after = 2
    await pair.ask(chat())
    first = await pair.under_way()
    await eventually(lambda: next(iter(pair.mesh.sent.values()), 0) == 2)
    await first.executor.hand_over()
    await eventually(lambda: len(pair.mesh.submitted) == 2, what="the other's Submit")
    pair.mesh.script.stuck_after = None
    log = await whole(pair)
    assert texts(log) == {0: TEXT}
    adopters = [event.gateway for _, event in log if isinstance(event, Adopted)]
    assert len(set(adopters)) == len(adopters) == 2
    one, two = pair.mesh.submitted
    assert two.epoch > one.epoch
    assert two.sampling == one.sampling
    assert count_ids(two.output_ids) == 2
    assert len(pair.mesh.generated) == 1
    await no_job_left(pair)


async def test_whoever_was_replaced_says_nothing_more(pair: Duo) -> None:
    """A gateway whose request was adopted behind its back: what it still appends is refused, its
    leg is cancelled, and its job comes to somebody again when the adopter is silent.
    """
    pair.mesh.script.stuck_after = 2
    await pair.ask(chat())
    first = await pair.under_way()
    await put(pair.store, Adopted(gateway="ghost"))
    pair.mesh.script.stuck_after = None
    await eventually(lambda: first.executor.running == 0 or pair.count("stored_adopted") == 2)
    log = await whole(pair)
    assert texts(log) == {0: TEXT}
    assert [e.gateway for _, e in log if isinstance(e, Adopted)][1] == "ghost"
    assert pair.count("stored_fenced") == 1
    await no_job_left(pair)


async def test_a_cancel_ends_what_runs(pair: Duo) -> None:
    """Whichever gateway is asked: the one that runs it cancels its legs and writes the end."""
    pair.mesh.script.stuck_after = 2
    await pair.ask(chat())
    await pair.under_way()
    for gateway in pair.gateways:
        log = await gateway.store.cancel(R, "t")
        assert log.status == "cancelled"
    assert log.ended is not None
    assert log.ended.completion_tokens == 2
    assert len(pair.mesh.cancelled) >= 1
    await whole(pair)
    await no_job_left(pair)


async def test_a_deleted_request_stops_running(pair: Duo) -> None:
    """Nothing of it is left: no log, no job, no leg; its readers are told."""
    pair.mesh.script.stuck_after = 2
    await pair.ask(chat())
    await pair.under_way()
    await pair.gateways[1].store.delete(R, "t")
    with pytest.raises(NotFound):
        await follow(pair.store)
    await no_job_left(pair)
    assert len(pair.mesh.cancelled) >= 1


async def test_a_log_that_vanishes_under_a_running_request(pair: Duo) -> None:
    """Purged behind everybody's back: the gateway lets go, and the name can be used again."""
    pair.mesh.script.stuck_after = 2
    await pair.ask(chat())
    await pair.under_way()
    await pair.store.jetstream.purge("stored", "mesh.v1.stored." + R)
    await pair.store.submit(R, chat(), keyed=True)
    pair.mesh.script.stuck_after = None
    assert texts(await whole(pair)) == {0: TEXT}
    await no_job_left(pair)


@pytest.mark.parametrize(
    ("body", "code"),
    [(b"{", "invalid_request"), (b'{"model":"another","messages":[]}', "not_found")],
)
async def test_what_cannot_be_run_ends_as_that(pair: Duo, body: bytes, code: str) -> None:
    """A body that this gateway does not take ends its request with the error that says why."""
    await pair.ask(submitted(body=body))
    log = await whole(pair)
    assert ended(log).code == code
    await no_job_left(pair)


async def test_a_failed_session_is_a_failed_request(pair: Duo) -> None:
    pair.mesh.script.fails, pair.mesh.script.fails_after = ("invalid_request", "no such thing"), 2
    await pair.ask(chat())
    log = await whole(pair)
    assert (ended(log).code, ended(log).detail) == ("invalid_request", "no such thing")
    assert ended(log).completion_tokens == 2
    await no_job_left(pair)


async def test_a_request_past_its_time_ends(pair: Duo) -> None:
    """Its time counts from its submission."""
    pair.mesh.script.stuck_after = 2
    await pair.ask(chat(timeout_s=0.5))
    assert ended(await whole(pair)).code == "deadline_exceeded"
    await no_job_left(pair)


async def test_a_nats_outage_pauses_a_request(tmp_path: Path) -> None:
    """The server dies mid-answer and comes back: the answer is that of a calm run."""
    server = start_nats(tmp_path)
    async with duo(server.server) as pair:
        pair.mesh.script.pieces = [f"{number} " for number in range(200)]
        pair.mesh.script.step_s = 0.005
        await pair.ask(chat(max_tokens=1000))
        await pair.under_way()
        reader = asyncio.create_task(whole(pair))
        server.process.kill()
        server.process.wait()
        server = start(server.server)
        assert texts(await reader) == {0: "".join(pair.mesh.script.pieces)}
        await no_job_left(pair)
    server.stop()


async def fill(pair: Duo, body: bytes) -> list[str]:
    """Store requests that nobody runs until no more fit; their names."""
    names: list[str] = []
    for number in range(2000):
        names.append(f"{len(body):016x}{number:016x}")
        try:
            await put(pair.store, submitted(body=body), request_id=names[-1])
        except StreamFull:
            return names
    raise AssertionError("it takes everything")


async def test_a_full_store_pauses_a_request(nats_server: Server) -> None:
    """Its events find no room: what cannot be logged is dropped, and generated again when there is.
    Plain requests do not notice, and new stored ones are refused.
    """
    config = StoredConfig(bytes_max=1 << 17, buffer_s=0.1, append_timeout_s=0.5, poll_s=0.2)
    async with duo(nats_server, config) as pair:
        pair.mesh.script.stuck_after = 2
        await pair.ask(chat())
        await pair.under_way()
        others = [*await fill(pair, b"x" * 10000), *await fill(pair, b"")]
        pair.mesh.script.stuck_after = None
        await eventually(lambda: pair.count("stored_buffers_dropped") >= 1)
        await eventually(lambda: all(gateway.store.why_not for gateway in pair.gateways))
        with pytest.raises(Unavailable):
            await pair.ask(chat(), "e" * 32)
        plain = Client(pair.gateways[0].bus, model=MODEL)
        answer = await plain.whole("completions", prompt="Hi")
        assert answer["choices"][0]["text"] == TEXT
        for name in others:
            await pair.store.jetstream.purge(LOGS, stored(name))
        assert texts(await whole(pair)) == {0: TEXT}
        await no_job_left(pair)


async def test_a_full_gateway_leaves_jobs_to_others(nats_server: Server) -> None:
    """With room for one each, two of three run and the third waits for its turn."""
    config = StoredConfig(ack_wait_s=1.0, working_s=0.3, poll_s=0.2, pull_s=0.5, running_max=1)
    async with duo(nats_server, config) as pair:
        pair.mesh.script.stuck_after = 2
        names = [f"{number:032x}" for number in range(3)]
        for name in names:
            await pair.ask(chat(), name)
        await eventually(lambda: pair.count("stored_adopted") == 2)
        logs = [await pair.store.look(name, "t") for name in names]
        assert sorted(log.status for log in logs) == ["in_progress", "in_progress", "queued"]
        pair.mesh.script.stuck_after = None
        for name in names:
            assert texts(await whole(pair, name)) == {0: TEXT}
        await no_job_left(pair)
