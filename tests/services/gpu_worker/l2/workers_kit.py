"""Two workers as the mesh sees them, two processes each."""

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from services.gpu_worker.service import GpuWorker
from shared.ids import pack_ids, unpack_ids
from shared.messages import Ended, Started, StepDone, encode
from shared.sampling import SamplingParams
from shared.subjects import inbox
from shared.testing import MemoryBroker, MemoryBus, eventually, running
from tests.services.gpu_worker.engine_kit import run
from tests.services.gpu_worker.l2.tier_kit import L2
from tests.services.launches import launch_of

SIM = {"step_ms": 1, "per_token_us": 0, "output_tokens_max": 0, "num_blocks": 256}


class TwoWorkers:
    """Simulated ones on a bus, and what they say."""

    def __init__(self, **sim: Any) -> None:
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker)
        self.workers = [self._worker(number, SIM | sim) for number in range(2)]
        self._heard: list[Started | StepDone | Ended] = []
        self._decode = msgspec.msgpack.Decoder(Started | StepDone | Ended).decode

    def _worker(self, number: int, sim: dict[str, Any]) -> GpuWorker:
        settings = {"engine": "sim", "drain_s": 0.2, "sim": sim, **L2}
        launch = launch_of("gpu_worker", f"gpu_worker-{number}-aaaaaa", settings, model_name="m")
        return GpuWorker(launch, MemoryBus(self.broker))

    @contextlib.asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        for subject in (inbox("g-1"), inbox("d-1"), inbox("s-1")):
            await self.bus.subscribe(subject, lambda d: self._heard.append(self._decode(d.payload)))
        async with running(self.workers[0]), running(self.workers[1]):
            yield

    def run(self, worker: int, choice: int, prompt: list[int], **changes: Any) -> None:
        """Begin a leg."""
        defaults = {"sampling": SamplingParams(max_tokens=20, seed=7)}
        message = run(term=3, choice=choice, prompt_ids=pack_ids(prompt), **defaults | changes)
        self.bus.publish(inbox(self.workers[worker].instance), encode(message))

    async def leg(self, worker: int, choice: int, prompt: list[int], **changes: Any) -> list[int]:
        """Run a leg to its end; its ids."""
        self.run(worker, choice, prompt, **changes)
        await eventually(lambda: self._has_ended(choice))
        return self.ids(choice)

    def count(self, worker: int, name: str) -> int:
        """A counter of an engine, as its worker has last read it."""
        return self.workers[worker].stats().get(f"engine_{name}", 0)

    def num_cached(self, choice: int) -> int:
        """What a gateway is told of a leg."""
        started = [message for message in self._heard if isinstance(message, Started)]
        (told,) = [message.num_cached_tokens for message in started if message.choice == choice]
        return told

    def ids(self, choice: int) -> list[int]:
        done = [message for message in self._heard if isinstance(message, StepDone)]
        records = [r for message in done for r in message.records if r.choice == choice]
        return [i for record in records for i in unpack_ids(record.ids)]

    def _has_ended(self, choice: int) -> bool:
        ended = [message for message in self._heard if isinstance(message, Ended)]
        return any(leg.choice == choice for message in ended for leg in message.legs)
