"""The shell around a core: what it takes, what it drops, what it tells, how it ends."""

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from shared import metrics
from shared.actor import Actor
from shared.clock import Clock, monotonic
from shared.config import Launch, Status
from shared.core import Outbox
from shared.ids import pack_ids
from shared.messages import (
    Beat,
    Cancel,
    Detokenize,
    Detokenized,
    Failed,
    Generate,
    Message,
    Run,
    StepDone,
    StepRecord,
    Submit,
    encode,
)
from shared.sampling import SamplingParams
from shared.subjects import beat, everyone, inbox
from shared.testing import FakeClock, MemoryBus, eventually, running


class Recorder:
    """A core that remembers; answers `Detokenize`, raises at the text `raise`."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.log: list[Any] = []

    def receive(self, message: Any, now: float) -> None:  # noqa: ARG002
        if isinstance(message, StepDone) and message.step < 0:
            raise ValueError("the core")
        self.log.append(message)
        if isinstance(message, Detokenize):
            if message.ids == b"raise":
                raise ValueError("the core")
            answer = Detokenized(
                request_id=message.request_id,
                attempt=message.attempt,
                tokenizer="t",
                text="x" * len(message.ids),
            )
            self.outbox.put(inbox(message.gateway), answer)

    def tick(self, now: float) -> None:  # noqa: ARG002
        if self.log[-1:] != ["tick"]:
            self.log.append("tick")

    def slept(self, now: float) -> None:  # noqa: ARG002
        self.log.append("slept")

    def connection_lost(self, now: float) -> None:  # noqa: ARG002
        self.log.append("lost")

    def reconnected(self, now: float) -> None:  # noqa: ARG002
        self.log.append("back")

    @property
    def messages(self) -> list[Any]:
        return [entry for entry in self.log if isinstance(entry, Message)]


class Echo(Actor):
    role: ClassVar[str] = "tokenizer"
    mailbox: ClassVar[Any] = Generate | Detokenize | Cancel | Submit | Run | StepDone
    tick_s: ClassVar[float] = 0.01
    survives_errors: ClassVar[bool] = True


class Fragile(Echo):
    survives_errors: ClassVar[bool] = False


def launch(tmp_path: Path, status_fd: int | None = None) -> Launch:
    return Launch(
        role="tokenizer",
        name="tokenizer-0",
        instance="tokenizer-0-abc",
        nats_url="",
        nats_user="",
        nats_password="",
        run_dir=str(tmp_path),
        status_fd=status_fd,
    )


ME = "tokenizer-0-abc"


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


def make(
    bus: MemoryBus, tmp_path: Path, kind: type[Actor] = Echo, clock: Clock = monotonic
) -> tuple[Actor, Recorder]:
    core = Recorder()
    return kind(launch(tmp_path), bus, core, clock), core


async def hearing(bus: MemoryBus, subject: str, kind: Any) -> list[Any]:
    """What of type `kind` is published on `subject` from now on."""
    heard: list[Any] = []
    decoder = msgspec.msgpack.Decoder(kind)
    await bus.subscribe(subject, lambda delivery: heard.append(decoder.decode(delivery.payload)))
    return heard


def detokenize(number: int, ids: bytes = b"abcd") -> Detokenize:
    return Detokenize(request_id=f"{number:032x}", attempt=1, gateway="g", ids=ids)


def cancel(number: int) -> Cancel:
    return Cancel(request_id=f"{number:032x}", choice=0, epoch=1)


def submit(deadline_ms: int = 0) -> Submit:
    return Submit(
        request_id="s" * 32,
        choice=2,
        epoch=3,
        gateway="g",
        model="m",
        tenant="t",
        prompt_ids=pack_ids([1]),
        sampling=SamplingParams(max_tokens=1),
        deadline_ms=deadline_ms,
    )


def dropped(reason: str) -> float:
    value: float = metrics.DROPPED.labels("tokenizer", reason)._value.get()
    return value


async def test_messages_reach_the_core_and_its_answers_the_bus(
    bus: MemoryBus, tmp_path: Path
) -> None:
    """By the own inbox and by everyone's."""
    actor, core = make(bus, tmp_path)
    heard = await hearing(bus, inbox("g"), Detokenized)
    async with running(actor):
        bus.publish(inbox(ME), encode(detokenize(1)))
        bus.publish(everyone("tokenizer"), encode(detokenize(2)))
        await eventually(lambda: len(heard) == 2)
    assert core.messages == [detokenize(1), detokenize(2)]
    assert actor.handled == 2


async def test_control_goes_first(bus: MemoryBus, tmp_path: Path) -> None:
    """Of what waits, `Cancel` is handled before all the rest; each lane keeps its order."""
    actor, core = make(bus, tmp_path)
    async with running(actor):
        for number in range(3):
            actor.on_payload(encode(detokenize(number)))
        actor.on_payload(encode(cancel(7)))
        actor.on_payload(encode(cancel(8)))
        await eventually(lambda: len(core.messages) == 5)
    assert core.messages == [cancel(7), cancel(8), *(detokenize(number) for number in range(3))]


async def test_a_full_mailbox_drops_the_oldest_of_its_lane(bus: MemoryBus, tmp_path: Path) -> None:
    """Counted; a flood of data costs no control message."""

    class Small(Echo):
        mailbox_limit: ClassVar[int] = 4

    actor, core = make(bus, tmp_path, Small)
    before = dropped("full")
    async with running(actor):
        actor.on_payload(encode(cancel(7)))
        for number in range(10):
            actor.on_payload(encode(detokenize(number)))
        await eventually(lambda: len(core.messages) == 5)
    assert core.messages == [cancel(7), *(detokenize(number) for number in range(6, 10))]
    assert dropped("full") - before == 6


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff\xfe", b"{}", b"\x81\xa4type\xa7Unknown", encode(detokenize(1))[:-3], bytes(1000)],
)
async def test_garbage_is_counted_and_hurts_nothing(
    bus: MemoryBus, tmp_path: Path, payload: bytes
) -> None:
    actor, core = make(bus, tmp_path)
    before = dropped("decode")
    async with running(actor):
        bus.publish(inbox(ME), payload)
        bus.publish(inbox(ME), encode(detokenize(1)))
        await eventually(lambda: core.messages == [detokenize(1)])
    assert dropped("decode") - before == 1
    assert actor.errors == 1


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


async def test_beats_tell_its_life(bus: MemoryBus, tmp_path: Path) -> None:
    """Not ready while starting, ready, draining; numbered without a gap."""
    go, end = asyncio.Event(), asyncio.Event()

    class Slow(Echo):
        beat_s: ClassVar[float] = 0.01

        async def on_start(self) -> None:
            await go.wait()

        async def drain(self) -> None:
            await end.wait()

    actor, _core = make(bus, tmp_path, Slow)
    heard: list[Beat] = await hearing(bus, beat("tokenizer"), Beat)
    life = asyncio.create_task(actor.run())
    await eventually(lambda: len(heard) >= 3)
    assert not any(one.ready for one in heard)
    go.set()
    await eventually(lambda: heard[-1].ready)
    actor.stop()
    await eventually(lambda: heard[-1].draining)
    end.set()
    await life
    assert [one.seq for one in heard] == list(range(1, len(heard) + 1))
    assert {(one.instance, one.role) for one in heard} == {(ME, "tokenizer")}


async def test_status_lines_reach_the_supervisor(bus: MemoryBus, tmp_path: Path) -> None:
    """One JSON line each; a supervisor that does not read blocks nothing."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    os.set_blocking(reader, False)
    try:
        while True:
            os.write(writer, b" " * 4096)  # nobody reads: full
    except BlockingIOError:
        pass
    actor = Echo(launch(tmp_path, writer), bus, Recorder())
    async with running(actor):
        with contextlib.suppress(BlockingIOError):
            while os.read(reader, 65536):
                pass
        actor._write_status()
        lines = os.read(reader, 65536).decode().strip().splitlines()
    assert [msgspec.json.decode(line, type=Status).state for line in lines] == ["ready"]
    os.close(reader)
    actor._write_status()  # nobody will ever read: not an error
    os.close(writer)


async def test_who_slept_is_told_before_it_judges(bus: MemoryBus, tmp_path: Path) -> None:
    """A tick that comes late: `slept`, then the messages that waited, then `tick`."""
    clock = FakeClock()
    actor, core = make(bus, tmp_path, clock=clock)
    async with running(actor):
        await eventually(lambda: core.log == ["tick"])
        clock.advance(5)
        bus.publish(inbox(ME), encode(cancel(1)))
        await eventually(lambda: core.log[-1:] == ["tick"] and len(core.log) > 2)
    assert core.log == ["tick", "slept", cancel(1), "tick"]


async def test_a_lost_connection_is_told_to_the_core(bus: MemoryBus, tmp_path: Path) -> None:
    """Lost, then back, each once; and between them its clocks are restarted before each tick."""
    actor, core = make(bus, tmp_path)
    async with running(actor):
        await eventually(lambda: core.log == ["tick"])
        bus.disconnect()
        await eventually(lambda: core.log.count("slept") > 2)
        bus.reconnect()
        await eventually(lambda: "back" in core.log)
        await eventually(lambda: core.log[-1:] == ["tick"])
    assert core.log[:3] == ["tick", "lost", "slept"]
    assert (core.log.count("lost"), core.log.count("back")) == (1, 1)
    assert core.log[core.log.index("back") :] == ["back", "slept", "tick"]


async def test_a_reconnect_between_two_ticks_is_noticed(bus: MemoryBus, tmp_path: Path) -> None:
    actor, core = make(bus, tmp_path)
    async with running(actor):
        bus.disconnect()
        bus.reconnect()
        actor.look_at_connection()
    assert [entry for entry in core.log if entry != "tick"] == ["lost", "back", "slept"]


async def test_draining_goes_on_handling_and_ends_in_time(bus: MemoryBus, tmp_path: Path) -> None:
    """Messages are handled while it drains; a drain that never ends is cut off."""
    order: list[str] = []

    class Endless(Echo):
        drain_s: ClassVar[float] = 0.2

        async def drain(self) -> None:
            order.append("drain")
            bus.publish(inbox(ME), encode(detokenize(9)))
            await asyncio.Event().wait()

        async def on_stop(self) -> None:
            order.append("stop")

    actor, core = make(bus, tmp_path, Endless)
    heard = await hearing(bus, inbox("g"), Detokenized)
    async with running(actor):
        pass
    assert order == ["drain", "stop"]
    assert core.messages == [detokenize(9)]
    assert len(heard) == 1


@pytest.mark.parametrize("scope", ["", ".shoal-tokenizer", f".shoal-tokenizer.{ME}"])
@pytest.mark.parametrize("verb", ["PING", "INFO", "STATS"])
async def test_the_micro_protocol_is_answered(
    bus: MemoryBus, tmp_path: Path, verb: str, scope: str
) -> None:
    actor, _core = make(bus, tmp_path)
    async with running(actor):
        bus.publish(inbox(ME), encode(detokenize(1)))
        await eventually(lambda: actor.handled == 1)
        answer = json.loads((await bus.request(f"$SRV.{verb}{scope}", b"", 1.0)).payload)
    assert answer["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
    assert (answer["name"], answer["id"], answer["version"]) == ("shoal-tokenizer", ME, "0.1.0")
    assert all(isinstance(value, str) for value in answer["metadata"].values())
    if verb == "INFO":
        assert [each["subject"] for each in answer["endpoints"]] == [
            inbox(ME),
            everyone("tokenizer"),
        ]
    if verb == "STATS":
        assert answer["endpoints"][0]["num_requests"] == 1
        assert "started" in answer


async def test_nothing_is_left_running(bus: MemoryBus, tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    actor, _core = make(bus, tmp_path)
    async with running(actor):
        pass
    assert asyncio.all_tasks() == before
