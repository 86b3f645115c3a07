"""The shell around a core: what it takes, in which order, what it tells, how it ends."""

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from shared.config import Status
from shared.messages import Beat, Detokenized, encode
from shared.subjects import beat, everyone, inbox
from shared.testing import FakeClock, MemoryBus, eventually, running
from tests.shared.actors import (
    ME,
    Echo,
    Recorder,
    cancel,
    detokenize,
    hearing,
    launch,
    make,
)


@pytest.fixture
def bus() -> MemoryBus:
    return MemoryBus()


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


async def test_slow_messages_let_the_loop_turn(bus: MemoryBus, tmp_path: Path) -> None:
    """Beats go out between messages that take long, however many wait."""
    clock = FakeClock()
    turns: list[int] = []

    class Slow(Echo):
        def receive(self, message: object, now: float) -> None:
            super().receive(message, now)
            clock.advance(0.1)
            asyncio.get_running_loop().call_soon(lambda: turns.append(self.handled))

    actor, _core = make(bus, tmp_path, Slow, clock)
    async with running(actor):
        for number in range(5):
            actor.on_payload(encode(detokenize(number)))
        await eventually(lambda: len(turns) == 5)
    assert turns == [1, 2, 3, 4, 5]


async def test_a_full_mailbox_drops_the_oldest_of_its_lane(bus: MemoryBus, tmp_path: Path) -> None:
    """Counted; a flood of data costs no control message."""

    class Small(Echo):
        mailbox_limit: ClassVar[int] = 4

    actor, core = make(bus, tmp_path, Small)
    async with running(actor):
        actor.on_payload(encode(cancel(7)))
        for number in range(10):
            actor.on_payload(encode(detokenize(number)))
        await eventually(lambda: len(core.messages) == 5)
    assert core.messages == [cancel(7), *(detokenize(number) for number in range(6, 10))]
    assert actor.stats()["dropped_full"] == 6


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
    """A tick that comes late: `slept` once, before the message that waited and before `tick`."""
    clock = FakeClock()
    actor, core = make(bus, tmp_path, clock=clock)
    async with running(actor):
        await eventually(lambda: "tick" in core.log)
        core.log.clear()
        clock.advance(5)
        bus.publish(inbox(ME), encode(cancel(1)))
        await eventually(lambda: {"tick", cancel(1)} <= set(core.log))
    assert core.log[0] == "slept"
    assert core.log.count("slept") == 1


async def test_a_lost_connection_is_told_to_the_core(bus: MemoryBus, tmp_path: Path) -> None:
    """Lost, then back, each once; and between them its clocks are restarted before each tick."""
    actor, core = make(bus, tmp_path)
    async with running(actor):
        await eventually(lambda: "tick" in core.log)
        core.log.clear()
        bus.disconnect()
        await eventually(lambda: core.log.count("slept") > 2)
        bus.reconnect()
        await eventually(lambda: "back" in core.log)
        await eventually(lambda: core.log[-1:] == ["tick"])
    assert core.log[:2] == ["lost", "slept"]
    assert (core.log.count("lost"), core.log.count("back")) == (1, 1)
    assert core.log[core.log.index("back") :] == ["back", "slept", "tick"]


async def test_a_reconnect_between_two_ticks_is_noticed(bus: MemoryBus, tmp_path: Path) -> None:
    actor, core = make(bus, tmp_path)
    async with running(actor):
        bus.disconnect()
        bus.reconnect()
        actor.look_at_connection()
    assert [entry for entry in core.log if entry != "tick"] == ["lost", "back", "slept"]


@pytest.mark.parametrize("bound_s", [0.2, 600.0])
async def test_draining_goes_on_handling_and_ends_in_time(
    bus: MemoryBus, tmp_path: Path, bound_s: float
) -> None:
    """Messages are handled while it drains. A drain that never ends is cut off by its own bound, or
    by whoever is in a hurry; then come the last words.
    """
    order: list[str] = []

    class Endless(Echo):
        drain_s = bound_s

        async def drain(self) -> None:
            order.append("drain")
            bus.publish(inbox(ME), encode(detokenize(9)))
            await asyncio.Event().wait()

        async def last_words(self) -> None:
            order.append("last words")

        async def on_stop(self) -> None:
            order.append("stop")

    actor, core = make(bus, tmp_path, Endless)
    heard = await hearing(bus, inbox("g"), Detokenized)
    async with running(actor):
        actor.stop()
        await eventually(lambda: len(heard) == 1)
        if bound_s > 1.0:
            actor.hurry()
    assert order == ["drain", "last words", "stop"]
    assert core.messages == [detokenize(9)]


async def test_settled_is_who_has_handled_all_that_comes(bus: MemoryBus, tmp_path: Path) -> None:
    """What was on its way when the drain began is handled before it ends."""

    class Settling(Echo):
        async def drain(self) -> None:
            await self.settled()

    actor, core = make(bus, tmp_path, Settling)
    loop = asyncio.get_running_loop()
    async with running(actor):
        for number in range(1, 6):
            message = encode(detokenize(number))
            loop.call_later(0.04 * number, bus.publish, inbox(ME), message)
    assert core.messages == [detokenize(number) for number in range(1, 6)]


async def test_a_drain_that_fails_is_a_failure(bus: MemoryBus, tmp_path: Path) -> None:
    """The process ends with the error, and says nothing more; it is not drained for nobody."""
    said: list[str] = []

    class Broken(Echo):
        drain_s = 600.0

        async def drain(self) -> None:
            self.fail(ValueError("the core"))
            await asyncio.Event().wait()

        async def last_words(self) -> None:
            said.append("last words")

    actor, _core = make(bus, tmp_path, Broken)
    with pytest.raises(ValueError, match="the core"):
        async with running(actor):
            pass
    assert said == []


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
        assert answer["endpoints"][0]["data"] == {"handled": 1, "errors": 0, "received": 1}
        assert "started" in answer


async def test_nothing_is_left_running(bus: MemoryBus, tmp_path: Path) -> None:
    before = asyncio.all_tasks()
    actor, _core = make(bus, tmp_path)
    async with running(actor):
        pass
    assert asyncio.all_tasks() == before
