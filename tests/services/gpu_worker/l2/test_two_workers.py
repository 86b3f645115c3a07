"""Two real workers, and what one takes over from the other through L2."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from deploy.servers import Server
from services.kv_tier.service import KvTier
from shared.errors import Unavailable
from shared.ids import pack_ids
from shared.messages import ToKvTier, encode
from shared.sampling import SamplingParams
from shared.subjects import beat, inbox
from shared.testing import MemoryBus, eventually, running
from tests.services.gpu_worker.l2.tier_kit import LONG, Tier
from tests.services.gpu_worker.l2.workers_kit import TwoWorkers
from tests.services.launches import launch_of


class TierOnBus(Tier):
    """Beats, and answers unless it is `mute`."""

    def __init__(self, mesh: TwoWorkers) -> None:
        super().__init__()
        self.mute = False
        self._bus = mesh.bus
        self._decode = msgspec.msgpack.Decoder(ToKvTier).decode

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        await self._bus.subscribe(inbox(self.instance), self._take)
        self._say_hello(1)  # before anything that a worker is sent from now on
        beating = asyncio.create_task(self._beat())
        yield
        beating.cancel()

    def _take(self, delivery: Any) -> None:
        question = self._decode(delivery.payload)
        for answer in [] if self.mute else self.answer(question):
            self._bus.publish(inbox(question.worker), encode(answer))

    async def _beat(self) -> None:
        for seq in range(2, 10_000):
            await asyncio.sleep(0.1)
            self._say_hello(seq)

    def _say_hello(self, seq: int) -> None:
        self._bus.publish(beat("kv_tier", self.instance), encode(self.beat(seq=seq)))


async def test_what_one_worker_has_computed_another_takes_from_l2() -> None:
    """By memory that its engine lends. A kv_tier that falls silent holds a leg up for no longer
    than it may, though the engine has nothing else to do.
    """
    mesh = TwoWorkers()
    tier = TierOnBus(mesh)
    async with mesh.up(), tier.up():
        truth = await mesh.leg(0, 1, LONG)
        await eventually(lambda: len(tier.blocks) >= len(LONG) // 16)
        ids = await mesh.leg(1, 2, LONG)
        tier.mute = True
        other = await mesh.leg(1, 3, LONG[8:])
        tier.mute = False
        same = await mesh.leg(0, 4, LONG[8:])
        await eventually(lambda: mesh.count(1, "l2_timeouts") == 1)

    assert (mesh.num_cached(1), mesh.num_cached(2)) == (0, len(LONG) // 16 * 16)
    assert ids == truth
    assert other == same


async def test_a_stream_of_3000_ids_computes_at_most_64_again_when_its_worker_dies(
    redis_server: Server,
) -> None:
    """With the real kv_tier and Redis: killed in the middle of a word, nothing prepared."""
    mesh = TwoWorkers(step_ms=10)
    tier = KvTier(
        launch_of("kv_tier", "kv_tier-0-aaaaaa", {}, redis_url=redis_server.url),
        MemoryBus(mesh.broker),
    )
    prompt = [(13 * i) % 900 for i in range(2940)]
    sampling = SamplingParams(max_tokens=100, seed=3)
    with contextlib.suppress(Unavailable):  # as the killed one ends
        async with mesh.up(), running(tier):
            await mesh.leg(1, 1, prompt[:20])  # long enough for a beat to be heard
            mesh.run(0, 2, prompt, sampling=sampling)
            await eventually(lambda: len(mesh.ids(2)) >= 60)
            pid = mesh.workers[0].engine.pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            delivered = mesh.ids(2)
            output_ids = pack_ids(delivered)
            rest = await mesh.leg(1, 3, prompt, output_ids=output_ids, sampling=sampling)
            await eventually(lambda: mesh.count(1, "recomputed_tokens") > 0)
            truth = await mesh.leg(1, 4, prompt, sampling=sampling, salt=b"another tenant")

    assert delivered + rest == truth
    assert mesh.num_cached(3) > 0
    assert mesh.count(1, "recomputed_tokens") <= 64
