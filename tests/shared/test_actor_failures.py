"""What goes wrong in an actor: told to whom it concerns, counted, and survived or not."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from shared.ids import pack_ids
from shared.messages import (
    Detokenized,
    Failed,
    Generate,
    Message,
    Run,
    StepDone,
    StepRecord,
    encode,
)
from shared.subjects import inbox
from shared.testing import FakeClock, MemoryBus, eventually, running
from tests.shared.actors import ME, Echo, Fragile, detokenize, hearing, make, submit


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff\xfe", b"{}", b"\x81\xa4type\xa7Unknown", encode(detokenize(1))[:-3], bytes(1000)],
)
async def test_garbage_is_counted_and_hurts_nothing(
    bus: MemoryBus, tmp_path: Path, payload: bytes
) -> None:
    actor, core = make(bus, tmp_path)
    async with running(actor):
        bus.publish(inbox(ME), payload)
        bus.publish(inbox(ME), encode(detokenize(1)))
        await eventually(lambda: core.messages == [detokenize(1)])
    assert (actor.stats()["dropped_decode"], actor.errors) == (1, 1)


@pytest.mark.parametrize("kind", ["generate", "submit", "run"])
async def test_what_expired_while_it_waited_is_refused(
    bus: MemoryBus, tmp_path: Path, kind: str
) -> None:
    """Its gateway is told `deadline_exceeded`, and the core never sees it."""
    messages: dict[str, Message] = {
        "generate": Generate(request_id="s" * 32, attempt=3, gateway="g", deadline_ms=100),
        "submit": submit(100),
        "run": Run(submit=submit(100), scheduler="s", term=1, detokenizer="d"),
    }
    clock = FakeClock()
    actor, core = make(bus, tmp_path, clock=clock)
    heard = await hearing(bus, inbox("g"), Failed)
    async with running(actor):
        actor.on_payload(encode(messages[kind]))
        actor.on_payload(encode(submit(10_000)))
        clock.advance(0.2)
        await eventually(lambda: bool(heard and core.messages))
    assert core.messages == [submit(10_000)]
    assert heard == [
        Failed(
            request_id="s" * 32,
            choice=-1 if kind == "generate" else 2,
            epoch=3,
            code="deadline_exceeded",
            detail="waited too long in a tokenizer",
        )
    ]


async def test_a_function_survives_its_error(bus: MemoryBus, tmp_path: Path) -> None:
    """The leg at hand is told `internal`, retryable; the next message is handled."""
    actor, _core = make(bus, tmp_path)
    heard = await hearing(bus, inbox("g"), Failed | Detokenized)
    async with running(actor):
        bus.publish(inbox(ME), encode(detokenize(1, b"raise")))
        bus.publish(inbox(ME), encode(detokenize(2)))
        await eventually(lambda: len(heard) == 2)
    failed, answered = heard
    assert (failed.request_id, failed.code, failed.retryable) == (f"{1:032x}", "internal", True)
    assert "the core" not in failed.detail, "the text of an exception is not for a client"
    assert answered.request_id == f"{2:032x}"


async def test_a_stateful_core_that_raises_ends_the_process(bus: MemoryBus, tmp_path: Path) -> None:
    """First every leg of the message is told; then `run` raises, without draining."""
    actor, _core = make(bus, tmp_path, Fragile)
    records = [StepRecord(str(n) * 32, n, 5, f"g{n}", index=0, ids=pack_ids([1])) for n in range(2)]
    heard = [await hearing(bus, inbox(f"g{n}"), Failed) for n in range(2)]
    life = asyncio.create_task(actor.run())
    await eventually(lambda: actor.ready)
    bus.publish(inbox(ME), encode(StepDone(worker="w", step=-1, records=records)))
    with pytest.raises(ValueError, match="the core"):
        await life
    assert [(h[0].request_id, h[0].choice, h[0].epoch) for h in heard] == [
        ("0" * 32, 0, 5),
        ("1" * 32, 1, 5),
    ]
    assert not actor.draining


async def test_who_cannot_take_a_payload_ends(bus: MemoryBus, tmp_path: Path) -> None:
    """A process that beats and handles nothing would draw the work of the whole mesh to itself."""

    class Deaf(Fragile):
        def on_payload(self, payload: bytes) -> None:
            raise ValueError(f"{len(payload)} bytes")

    actor, _core = make(bus, tmp_path, Deaf)
    life = asyncio.create_task(actor.run())
    await eventually(lambda: actor.ready)
    bus.publish(inbox(ME), b"four")
    async with asyncio.timeout(10):
        with pytest.raises(ValueError, match="4 bytes"):
            await life


async def test_a_start_that_fails_is_raised(bus: MemoryBus, tmp_path: Path) -> None:
    """And what was opened is closed."""

    class Broken(Echo):
        async def on_start(self) -> None:
            raise OSError("no weights")

        async def on_stop(self) -> None:
            closed.append(1)

    closed: list[int] = []
    actor, _core = make(bus, tmp_path, Broken)
    with pytest.raises(OSError, match="no weights"):
        await actor.run()
    assert closed == [1]


async def test_a_message_too_large_to_send_fails_its_leg(tmp_path: Path) -> None:
    """Never silence: the gateway hears `invalid_request` instead."""
    bus = MemoryBus(max_payload=2000)
    actor, _core = make(bus, tmp_path)
    heard = await hearing(bus, inbox("g"), Failed)
    async with running(actor):
        actor.publish("mesh.v1.in.w", msgspec.structs.replace(submit(), prompt_ids=bytes(4000)))
        await eventually(lambda: len(heard) == 1)
    assert (heard[0].code, heard[0].choice, heard[0].epoch) == ("invalid_request", 2, 3)
