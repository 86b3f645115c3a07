"""The KV tier process of a node: which blocks does L2 hold? A doubt is a miss, never an error."""

import asyncio

import msgspec

from services.kv_tier.config import Config
from services.kv_tier.store import BlockStore
from shared.actor import Actor
from shared.breaker import Breaker, Permit
from shared.bus import Bus
from shared.clock import Clock, monotonic
from shared.config import Launch, Status, settings
from shared.errors import Unavailable
from shared.kv import HASH_SIZE
from shared.messages import Beat, BlocksFound, LookupBlocks, ToKvTier
from shared.process import run_service
from shared.subjects import inbox


class KvTier(Actor):
    """Answers `LookupBlocks`; each in its own task, behind a breaker."""

    role = "kv_tier"
    mailbox = ToKvTier

    def __init__(self, launch: Launch, bus: Bus, clock: Clock = monotonic) -> None:
        super().__init__(launch, bus, None, clock)
        self.config = settings(launch.settings, Config, self.role)
        self.breaker = Breaker(self.config.breaker)
        self.lookups = self.misses = self.failures = 0
        self._store = BlockStore(launch.redis_url, self.config) if launch.redis_url else None
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, message: LookupBlocks, now: float) -> None:
        self.lookups += 1
        store, permit = self._store, None
        if store is not None and len(self._tasks) < self.config.max_lookups:
            permit = self.breaker.enter(now)
        if store is None or permit is None:
            self._answer(message, 0)
            return
        task = asyncio.create_task(self._look_up(store, message, permit))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stats(self) -> dict[str, int]:
        return super().stats() | {
            "lookups": self.lookups,
            "misses": self.misses,
            "failures": self.failures,
            "breaker_opened": self.breaker.opened,
            "breaker_refused": self.breaker.refused,
        }

    def beat(self) -> Beat:
        return msgspec.structs.replace(super().beat(), load=len(self._tasks))

    def status(self) -> Status:
        extra: dict[str, int | str] = {"breaker": self.breaker.state(self.clock())}
        return msgspec.structs.replace(super().status(), load=len(self._tasks), extra=extra)

    async def drain(self) -> None:
        """Answer what was asked, which takes as long as Redis may take."""
        await self.settled()
        await asyncio.gather(*self._tasks)

    async def on_stop(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._store is not None:
            await self._store.close()

    async def _look_up(self, store: BlockStore, message: LookupBlocks, permit: Permit) -> None:
        packed = message.block_hashes
        whole = len(packed) - len(packed) % HASH_SIZE
        block_hashes = [packed[at : at + HASH_SIZE] for at in range(0, whole, HASH_SIZE)]
        found, worked = 0, None
        try:
            found = await store.count_prefix(block_hashes)
            worked = True
        except Unavailable:
            worked = False
            self.failures += 1
        finally:
            permit.end(worked, self.clock())
        self._answer(message, found)

    def _answer(self, message: LookupBlocks, found: int) -> None:
        self.misses += found == 0
        answer = BlocksFound(lookup_id=message.lookup_id, kv_tier=self.instance, num_blocks=found)
        self.publish(inbox(message.worker), answer)


def main(launch: Launch) -> None:
    run_service(launch, KvTier)
