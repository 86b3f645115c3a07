"""The detokenizer process around its core, on a bus in memory."""

from typing import Any

import msgspec
import pytest

from services.detokenizer.service import Detokenizer
from shared.bus import Delivery
from shared.config import ConfigError, Launch
from shared.ids import pack_ids
from shared.messages import RouteLost, StepDone, StepRecord, TextContext, TextDelta, encode
from shared.model_files import default_model
from shared.sampling import TextParams
from shared.subjects import inbox
from shared.testing import MemoryBroker, MemoryBus, eventually, running
from tests.services.launches import launch_of


def launch(**settings: Any) -> Launch:
    return launch_of("detokenizer", "detok-1", settings, model=str(default_model()))


async def test_a_step_becomes_text_at_the_gateway() -> None:
    """Ids of the default model, sent as a worker sends them, arrive as text."""
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    heard: list[Delivery] = []
    await bus.subscribe(inbox("gw"), heard.append)
    context = TextContext(b"", b"", TextParams())
    ids = pack_ids([19556, 905])
    record = StepRecord("r", 0, 1, "gw", 0, ids, "length", context=context)
    actor = Detokenizer(launch(), MemoryBus(broker))
    async with running(actor):
        step = StepDone(worker="w", step=1, records=[record])
        bus.publish(inbox("detok-1"), encode(step))
        await eventually(lambda: bool(heard))
    [text] = msgspec.msgpack.decode(heard[0].payload, type=TextDelta).records
    assert (text.text, text.finish_reason) == ("Hello world", "length")
    assert actor.beat().load == 0


async def test_a_stopped_detokenizer_hands_its_legs_over() -> None:
    """As long as workers send it steps it answers each leg with the advice to go elsewhere."""
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    heard: list[RouteLost | TextDelta] = []
    decoder = msgspec.msgpack.Decoder(RouteLost | TextDelta)
    await bus.subscribe(
        inbox("gw"), lambda delivery: heard.append(decoder.decode(delivery.payload))
    )
    actor = Detokenizer(launch(), MemoryBus(broker))

    def send(index: int, context: TextContext | None) -> None:
        record = StepRecord("r", 0, 1, "gw", index, pack_ids([19556]), context=context)
        bus.publish(inbox("detok-1"), encode(StepDone(worker="w", step=1, records=[record])))

    async with running(actor):
        send(0, TextContext(b"", b"", TextParams()))
        await eventually(lambda: len(heard) == 1)
        actor.stop()
        await eventually(lambda: actor.draining)
        send(1, None)
    lost = heard[-1]
    assert isinstance(lost, RouteLost)
    assert lost.reason == "drain"
    assert actor.legs.num_legs == 0


def test_unknown_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="lease_ms"):
        Detokenizer(launch(lease_ms=3), MemoryBus(MemoryBroker()))
