"""Submit, follow, look, cancel and delete, on a real JetStream; nobody runs anything here."""

import asyncio
import contextlib
from contextlib import aclosing

import pytest

from services.gateway.openai.errors import PayloadTooLarge
from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import (
    Adopted,
    CancelRequested,
    Ended,
    Event,
    Output,
    Piece,
    Submitted,
    encode_event,
)
from services.gateway.stored.store import IdempotencyConflict, Logged, Store, request_id_of
from services.gateway.stored.streams import CONSUMER, JOBS, LOGS
from shared.bus import Delivery
from shared.errors import NotFound, Unavailable
from shared.ids import pack_ids
from shared.jetstream import EXPECTED, StreamFull, WorkQueue, heard
from shared.nats_bus import NatsBus
from shared.subjects import logged, stored
from shared.testing import MemoryBus, eventually
from tests.services.gateway.stored.kit import R, follow, keeping, put, submitted


def output(index: int) -> Output:
    return Output(pieces=[Piece(0, index, pack_ids([index]), f"{index} ")])


def events(log: list[Logged]) -> list[Event]:
    return [logged.event for logged in log]


async def test_the_same_key_is_one_request(store: Store, bus: NatsBus) -> None:
    """Eight submissions of one key at once: one log with one `Submitted`, one job; the same key
    with another body, or for another endpoint, is refused.
    """
    asked = submitted()
    logs = await asyncio.gather(*(store.submit(R, asked, keyed=True) for _ in range(8)))
    assert {log.last for log in logs} == {logs[0].last}
    entries = await store.jetstream.read(LOGS, stored(R))
    assert [entry.payload for entry in entries] == [encode_event(asked)]
    queue = WorkQueue(bus, JOBS, CONSUMER)
    taken = await queue.next(1.0)
    assert taken is not None
    assert taken.name == R
    assert await queue.next(0.2) is None, "one job"
    with pytest.raises(IdempotencyConflict) as refused:
        await store.submit(R, submitted(body=b'{"a":2}'), keyed=True)
    assert refused.value.status == 422
    taken.done()
    assert store.counters["stored_submitted"] == 1


async def test_a_key_names_its_request_for_its_tenant_alone() -> None:
    """The same key of another tenant, or of another cluster, is another request."""
    names = {
        request_id_of(secret, tenant, key)
        for secret in (b"s", b"t")
        for tenant, key in (("a", "k"), ("b", "k"), ("a", "l"), ("", "1:k"), ("1", ":k"))
    }
    assert len(names) == 10
    assert request_id_of(b"s", "a", "k") in names
    assert all(len(name) == 32 for name in names)


async def test_a_key_comes_back_after_its_end(store: Store, bus: NatsBus) -> None:
    """A request that has ended is not run again for its key: the same log, and no job."""
    await put(store, submitted(), Adopted(gateway="g"), output(0), Ended())
    log = await store.submit(R, submitted(), keyed=True)
    assert log.status == "completed"
    assert await WorkQueue(bus, JOBS, CONSUMER).next(0.2) is None


async def test_a_reader_sees_each_event_once_and_in_order(store: Store) -> None:
    """Whether it comes before, during or after: the past, then what is stored while it waits."""
    sent: list[Event] = [submitted(), Adopted(gateway="g"), *map(output, range(20)), Ended()]
    await put(store, *sent[:3])
    early = [asyncio.create_task(follow(store)) for _ in range(4)]
    for event in sent[3:]:
        await put(store, event)
    read = [*await asyncio.gather(*early), await follow(store)]
    assert [events(log) for log in read] == [sent] * 5
    assert len({tuple(each.seq for each in log) for log in read}) == 1


async def test_a_reader_that_hears_nothing_reads(
    store: Store, bus: NatsBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of what the server says is lost on its way to a reader: it misses nothing."""
    lossy, subscribe = [0], bus.subscribe

    async def losing(subject: str, handler: object, queue: str = "") -> object:
        def take(delivery: Delivery) -> None:
            lossy[0] += 1
            if lossy[0] % 2:
                handler(delivery)  # type: ignore[operator]

        return await subscribe(subject, take if subject == logged(R) else handler, queue)  # type: ignore[arg-type]

    monkeypatch.setattr(bus, "subscribe", losing)
    sent: list[Event] = [submitted(), Adopted(gateway="g"), *map(output, range(20)), Ended()]
    await put(store, *sent[:1])
    reader = asyncio.create_task(follow(store))
    for event in sent[1:]:
        await put(store, event)
    assert events(await reader) == sent
    assert lossy[0] > 1, "something was lost"


async def test_a_refused_append_is_heard_by_nobody(store: Store, bus: NatsBus) -> None:
    """What a gateway that was fenced publishes reaches no reader."""
    last = await put(store, submitted(), Adopted(gateway="a"))
    told: list[Delivery] = []
    await bus.subscribe(logged(R), told.append)
    await put(store, Adopted(gateway="b"))
    bus.publish(stored(R), encode_event(output(0)), headers={EXPECTED: str(last)})
    await put(store, Ended())
    await eventually(lambda: len(told) == 2)
    assert [heard(delivery).payload for delivery in told] == [
        encode_event(event) for event in (Adopted(gateway="b"), Ended())
    ]


async def test_tenants_do_not_see_each_other(store: Store) -> None:
    """To another tenant a request is not there, whatever it is asked for."""
    await put(store, submitted(tenant="a"))
    for tenant in ("b", ""):
        with pytest.raises(NotFound):
            await store.look(R, tenant)
        with pytest.raises(NotFound):
            await store.cancel(R, tenant)
        with pytest.raises(NotFound):
            await store.delete(R, tenant)
        with pytest.raises(NotFound):
            await follow(store, tenant)
    assert (await store.look(R, "a")).status == "queued"


async def test_nothing_is_found_where_nothing_is(store: Store) -> None:
    for act in (store.look, store.cancel, store.delete):
        with pytest.raises(NotFound):
            await act(R, "t")
    with pytest.raises(NotFound):
        await follow(store)


async def test_a_cancel_before_it_runs_ends_it(store: Store) -> None:
    """Nobody runs it, so nobody has to be waited for; a second cancel changes nothing."""
    await put(store, submitted())
    assert (await store.cancel(R, "t")).status == "cancelled"
    assert (await store.cancel(R, "t")).status == "cancelled"
    kinds = [type(event) for event in events(await follow(store))]
    assert kinds == [Submitted, CancelRequested, Ended]


async def test_a_cancel_waits_for_whoever_runs_it(store: Store) -> None:
    """It is told through the log, and its end is what the client is told."""
    await put(store, submitted(), Adopted(gateway="g"), output(0))
    cancelling = asyncio.create_task(store.cancel(R, "t"))
    async with aclosing(store.follow(R, "t")) as log:
        async for _, event in log:
            if isinstance(event, CancelRequested):
                break
    await put(store, Ended(code="cancelled", completion_tokens=1))
    ended = await cancelling
    assert ended.status == "cancelled"
    assert ended.ended is not None
    assert ended.ended.completion_tokens == 1


async def test_a_cancel_and_the_last_words_meet(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appends of two at once, 20 times: none is lost and none comes twice."""
    monkeypatch.setattr("services.gateway.stored.store.CANCEL_WAIT_S", 0.1)
    await put(store, submitted(), Adopted(gateway="g"))

    async def run() -> None:
        for index in range(20):
            await put(store, output(index))

    writing = asyncio.create_task(run())
    log = await store.cancel(R, "t")
    assert log.cancel_requested
    await writing
    await put(store, Ended(code="cancelled"))
    kinds = [type(event) for event in events(await follow(store))]
    assert kinds.count(CancelRequested) == 1
    assert kinds.count(Output) == 20


async def test_a_deleted_request_is_gone_for_its_readers_too(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who reads it is told; its key may be used anew, and old readers do not see the new log."""
    monkeypatch.setattr("services.gateway.stored.store.CANCEL_WAIT_S", 0.1)
    await put(store, submitted(), Adopted(gateway="dead"))
    readers = [asyncio.create_task(follow(store)) for _ in range(3)]
    async with aclosing(store.follow(R, "t")) as slow:
        await anext(slow)
        await store.delete(R, "t")
        with pytest.raises(NotFound):
            await store.look(R, "t")
        await store.submit(R, submitted(body=b'{"another":1}'), keyed=True)
        rest: list[Event] = []
        with contextlib.suppress(NotFound):
            async for _, event in slow:
                rest.append(event)
    assert not [event for event in rest if isinstance(event, Submitted)]
    for reader in readers:
        with pytest.raises(NotFound):
            await reader
    assert (await store.look(R, "t")).status == "queued"


async def test_a_request_that_nobody_ends_is_ended_by_its_reader(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past its deadline and a grace, a request without an end gets one: no silent request."""
    monkeypatch.setattr("services.gateway.stored.store.GRACE_S", 0.3)
    await put(store, submitted(timeout_s=0.1), Adopted(gateway="dead"))
    logs = await asyncio.gather(follow(store), follow(store))
    for log in logs:
        end = log[-1].event
        assert isinstance(end, Ended)
        assert end.code == "deadline_exceeded"
        assert len(log) == 3


async def test_a_body_too_large_is_refused(store: Store) -> None:
    with pytest.raises(PayloadTooLarge):
        await store.submit(R, submitted(body=b"x" * ((1 << 20) + 1)), keyed=False)
    assert await store.jetstream.read(LOGS, stored(R)) == []


async def test_a_full_queue_takes_nothing(bus: NatsBus, store: Store) -> None:
    """Without room for its job a request is refused; one without a key leaves nothing behind, one
    with a key is taken when it comes again and there is room.
    """
    small = Store(bus, StoredConfig(jobs_max=1))
    async with keeping(small):
        await eventually(lambda: not small.why_not)
        await small.submit("a" * 32, submitted(), keyed=False)
        for keyed, left in ((False, 0), (True, 1)):
            with pytest.raises(StreamFull):
                await small.submit(R, submitted(), keyed=keyed)
            assert len(await small.jetstream.read(LOGS, stored(R))) == left
        queue = WorkQueue(bus, JOBS, CONSUMER)
        first = await queue.next(1.0)
        assert first is not None
        first.done()
        await bus.flush()
        await small.submit(R, submitted(), keyed=True)
        second = await queue.next(1.0)
        assert second is not None
        assert second.name == R


async def test_a_full_store_takes_nothing_new(bus: NatsBus, store: Store) -> None:
    """New requests are refused before the last bytes are used: those belong to what runs."""
    small = Store(bus, StoredConfig(bytes_max=1 << 16))
    async with keeping(small):
        await eventually(lambda: not small.why_not)
        await put(small, submitted(body=b"x" * 60_000))
        await eventually(lambda: small.why_not != "", what="full")
        with pytest.raises(Unavailable):
            await small.submit("b" * 32, submitted(), keyed=False)
        last = await put(small, Adopted(gateway="g"))
        assert last > 0, "what runs goes on"


async def test_without_jetstream_nothing_is_taken() -> None:
    store = Store(MemoryBus(), StoredConfig(append_timeout_s=0.1))
    async with keeping(store):
        await eventually(lambda: "JetStream" in store.why_not)
        with pytest.raises(Unavailable):
            await store.submit(R, submitted(), keyed=False)
        with pytest.raises(Unavailable):
            await follow(store)
