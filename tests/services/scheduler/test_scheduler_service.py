"""The scheduler process around its core: it hears the pool, and shows itself once it leads."""

import asyncio

import msgspec
import pytest

from services.scheduler.service import Scheduler
from shared import subjects
from shared.config import ConfigError, Launch
from shared.messages import Accepted, Beacon, Beat, Run, ToGateway, encode
from shared.testing import MemoryBroker, MemoryBus, eventually, running
from tests.services.launches import launch_of
from tests.services.scheduler.rig import submit


def launch(**settings: object) -> Launch:
    return launch_of("scheduler", "scheduler-0-1", settings)


async def test_a_scheduler_leads_accepts_and_places() -> None:
    """Beats make a worker known, a beacon shows the leader, a Submit becomes a Run."""
    broker = MemoryBroker()
    bus = MemoryBus(broker)
    seen: list[object] = []
    decoder = msgspec.msgpack.Decoder(ToGateway | Run)
    for subject in (subjects.beacon("default"), subjects.inbox("g"), subjects.inbox("w0")):
        await bus.subscribe(subject, lambda delivery: seen.append(decoder.decode(delivery.payload)))
    peers = [
        Beat(instance="w0", role="gpu_worker", seq=1, max_model_len=64, step_tokens=32),
        Beat(instance="d0", role="detokenizer", seq=1),
    ]

    def led_with_a_worker() -> bool:
        for beat in peers:
            bus.publish(subjects.beat(beat.role, beat.instance), encode(beat))
        return any(isinstance(message, Beacon) and message.workers == 1 for message in seen)

    async with running(Scheduler(launch(), MemoryBus(broker))) as actor:
        await eventually(led_with_a_worker)
        bus.publish(subjects.inbox(actor.instance), encode(submit()))
        await eventually(lambda: any(isinstance(message, Run) for message in seen))
        assert any(isinstance(message, Accepted) for message in seen)
        assert actor.beat().term == 1
        assert actor.status().extra["workers"] == 1


async def test_a_stopped_leader_leaves_its_office_to_the_standby() -> None:
    """SIGTERM of the leader: the standby leads although it never missed a beacon."""
    broker = MemoryBroker()
    standby = Scheduler(launch_of("scheduler", "scheduler-1-1", {}), MemoryBus(broker))
    async with running(Scheduler(launch(), MemoryBus(broker))) as leader:
        await eventually(lambda: leader.scheduler.is_leader)
        stood_by = asyncio.create_task(standby.run())
        await eventually(lambda: standby.ready)
        term = leader.scheduler.term
    assert not leader.scheduler.is_leader
    await eventually(lambda: standby.scheduler.is_leader)
    assert standby.scheduler.term == term + 1
    standby.stop()
    await stood_by


def test_a_bad_setting_stops_it_and_names_the_key() -> None:
    """A typo in cluster.toml is found at the start."""
    with pytest.raises(ConfigError, match="queue_size"):
        Scheduler(launch(queue_size=3), MemoryBus())
    with pytest.raises(ConfigError, match="aging_s"):
        Scheduler(launch(aging_s=0.0), MemoryBus())
