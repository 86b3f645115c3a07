"""Workers as the mesh sees them, two processes each, and a kv_tier between them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from services.gpu_worker.service import GpuWorker
from shared.ids import pack_ids, unpack_ids
from shared.messages import (
    Ended,
    Run,
    Started,
    StepDone,
    Submit,
    ToKvTier,
    encode,
)
from shared.sampling import SamplingParams
from shared.subjects import beat, inbox
from shared.testing import MemoryBroker, MemoryBus, eventually, running
from tests.services.gpu_worker.l2.tier_kit import L2, LONG, Tier
from tests.services.launches import launch_of

SIM = {"step_ms": 1, "per_token_us": 0, "output_tokens_max": 0, "num_blocks": 256}
Heard = Started | StepDone | Ended


class Mesh:
    """Two workers and `tier`, which beats, and answers unless it is `mute`."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.tier = Tier()
        self.mute = False
        self.heard: list[Any] = []
        self.workers = [self._worker(number) for number in range(2)]
        self._decode = msgspec.msgpack.Decoder(Heard).decode
        self._decode_question = msgspec.msgpack.Decoder(ToKvTier).decode

    def _worker(self, number: int) -> GpuWorker:
        settings = {"engine": "sim", "drain_s": 0.2, "sim": SIM, **L2}
        launch = launch_of("gpu_worker", f"gpu_worker-{number}-aaaaaa", settings, model_name="m")
        return GpuWorker(launch, MemoryBus(self.broker))

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        for subject in (inbox("g-1"), inbox("d-1"), inbox("s-1")):
            await self.bus.subscribe(subject, self._hear)
        await self.bus.subscribe(inbox(self.tier.instance), self._answer)
        async with running(self.workers[0]), running(self.workers[1]):
            self._say_hello(1)  # before anything that a worker is sent from now on
            beating = asyncio.create_task(self._beat())
            yield
            beating.cancel()

    async def leg(self, worker: int, choice: int, prompt: list[int]) -> tuple[int, list[int]]:
        """How much of it was cached, and its ids."""
        submit = Submit(
            request_id="r",
            choice=choice,
            epoch=1,
            gateway="g-1",
            model="m",
            tenant="t",
            prompt_ids=pack_ids(prompt),
            sampling=SamplingParams(max_tokens=20, seed=7),
        )
        run = Run(submit=submit, scheduler="s-1", term=3, detokenizer="d-1")
        self.bus.publish(inbox(self.workers[worker].instance), encode(run))
        await eventually(
            lambda: any(leg.choice == choice for e in self._of(Ended) for leg in e.legs)
        )
        (started,) = [message for message in self._of(Started) if message.choice == choice]
        records = [record for message in self._of(StepDone) for record in message.records]
        ids = [i for r in records if r.choice == choice for i in unpack_ids(r.ids)]
        return started.num_cached_tokens, ids

    def _of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.heard if isinstance(message, kind)]

    def _hear(self, delivery: Any) -> None:
        self.heard.append(self._decode(delivery.payload))

    def _answer(self, delivery: Any) -> None:
        question = self._decode_question(delivery.payload)
        for answer in [] if self.mute else self.tier.answer(question):
            self.bus.publish(inbox(question.worker), encode(answer))

    async def _beat(self) -> None:
        for seq in range(2, 10_000):
            await asyncio.sleep(0.1)
            self._say_hello(seq)

    def _say_hello(self, seq: int) -> None:
        subject = beat("kv_tier", self.tier.instance)
        self.bus.publish(subject, encode(self.tier.beat(seq=seq)))


async def test_what_one_worker_has_computed_another_takes_from_l2() -> None:
    """By memory that its engine lends. A kv_tier that falls silent holds a leg up for no longer
    than it may, though the engine has nothing else to do.
    """
    mesh = Mesh()
    async with mesh.up():
        cached, truth = await mesh.leg(0, 1, LONG)
        await eventually(lambda: len(mesh.tier.blocks) >= len(LONG) // 16)
        again, ids = await mesh.leg(1, 2, LONG)
        mesh.mute = True
        _, other = await mesh.leg(1, 3, LONG[8:])
        mesh.mute = False
        _, same = await mesh.leg(0, 4, LONG[8:])
        stats = mesh.workers[1].stats()

    assert cached == 0
    assert again == len(LONG) // 16 * 16
    assert ids == truth
    assert other == same
    assert stats["engine_l2_timeouts"] == 1
