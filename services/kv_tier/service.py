"""The KV tier process of a host: L2 for its workers. A doubt is a miss, never an error."""

import asyncio
import os
import time
from collections import Counter

import msgspec

from services.kv_tier.backlog import Backlog
from services.kv_tier.config import Config
from services.kv_tier.lenders import Lenders
from services.kv_tier.store import BlockStore
from services.kv_tier.work import look_up, write
from shared.actor import Actor
from shared.bus import Bus
from shared.clock import Clock, monotonic
from shared.config import Launch, Status, settings
from shared.messages import (
    Beat,
    BlocksFound,
    BlocksStored,
    LookupBlocks,
    ReturnSlots,
    StoreBlocks,
    ToKvTier,
)
from shared.process import run_service
from shared.slots import BorrowedSlots, host
from shared.subjects import inbox

_OF_ITS_TIME = 0.9  # of what a worker waits for: the answer must come home, too


class KvTier(Actor):
    """Lookups run side by side, writes one after the other beside them."""

    role = "kv_tier"
    mailbox = ToKvTier

    def __init__(self, launch: Launch, bus: Bus, clock: Clock = monotonic) -> None:
        super().__init__(launch, bus, None, clock)
        self.config = settings(launch.settings, Config, self.role)
        self.store = BlockStore([url for url in launch.redis_url.split(",") if url], self.config)
        self.lenders = Lenders(self.config.max_workers)
        self.counts = Counter(lookups=0, misses=0)
        self._host = host() if self.store.shards else ""  # "": nobody is to ask us
        self._backlog = Backlog(self.config.max_stores, self.config.max_store_mb << 20)
        self._in_hand: set[tuple[str, int]] = set()  # worker, generation: their slots are ours
        self._lookups: set[asyncio.Task[None]] = set()
        self._writer: asyncio.Task[None] | None = None

    def receive(self, message: ToKvTier, now: float) -> None:  # noqa: ARG002 the Actor passes it
        match message:
            case ReturnSlots():
                self._return(message)
            case LookupBlocks() if self._enter(message.worker, message.lookup_id):
                self.counts["lookups"] += 1
                if len(self._lookups) < self.config.max_lookups:
                    task = asyncio.create_task(self._look_up(message))
                    self._lookups.add(task)
                    task.add_done_callback(self._ended)
                else:
                    self.counts["dropped_lookups"] += 1
                    self._found(message, self._borrow(message, message.lookup_id), 0, 0)
            case StoreBlocks() if self._enter(message.worker, message.store_id):
                self.counts["stores"] += 1
                for dropped in self._backlog.push(message):
                    self.counts["dropped_stores"] += 1
                    self.counts["dropped_blocks"] += len(dropped.slots)
                    self._stored(dropped, self._borrow(dropped, dropped.store_id), 0)
                if self._writer is None and len(self._backlog):
                    self._writer = asyncio.create_task(self._write())
                    self._writer.add_done_callback(self._ended)
            case _:
                self.counts["duplicates"] += 1

    def tick(self, now: float) -> None:
        self.lenders.sweep(now)

    def stats(self) -> dict[str, int]:
        shards = self.store.shards
        return super().stats() | {
            **self.counts,
            "refused_slots": self.lenders.refused,
            "mapped_workers": len(self.lenders),
            "failures": sum(shard.failures for shard in shards),
            "breaker_opened": sum(shard.breaker.opened for shard in shards),
            "breaker_refused": sum(shard.breaker.refused for shard in shards),
        }

    def beat(self) -> Beat:
        return msgspec.structs.replace(
            super().beat(), load=len(self._in_hand), host=self._host, pid=os.getpid()
        )

    def status(self) -> Status:
        states = {shard.breaker.state(self.clock()) for shard in self.store.shards}
        extra: dict[str, int | str] = {"breaker": "/".join(sorted(states)) or "no redis"}
        return msgspec.structs.replace(super().status(), load=len(self._in_hand), extra=extra)

    async def drain(self) -> None:
        """Do what was asked, which takes as long as Redis may take."""
        await self.settled()
        await self._done()

    async def on_stop(self) -> None:
        while len(self._backlog):  # nobody waits for them
            self._backlog.pop()
        await self._done()  # not cancelled: threads are at work in slots
        await self.store.close()
        self.lenders.close()

    async def _look_up(self, message: LookupBlocks) -> None:
        started = time.monotonic()
        timeout_s = self.config.answer_s
        if message.deadline_ms:
            timeout_s = min(timeout_s, _OF_ITS_TIME * message.deadline_ms / 1000)
        memory = self._borrow(message, message.lookup_id)
        found, loaded, counts = await look_up(self.store, message, memory, started + timeout_s)
        self.counts.update(counts)
        self.counts["load_us" if loaded else "lookup_us"] += _us_since(started)
        self._found(message, memory, found, loaded)

    async def _write(self) -> None:
        while len(self._backlog):
            message = self._backlog.pop()
            started = time.monotonic()
            memory = self._borrow(message, message.store_id)
            deadline = started + self.config.store_s
            present, counts = await write(self.store, message, memory, deadline)
            self.counts.update(counts)
            self.counts["store_us"] += _us_since(started)
            self._stored(message, memory, present)
        self._writer = None

    def _found(
        self, message: LookupBlocks, memory: BorrowedSlots | None, found: int, loaded: int
    ) -> None:
        self.counts["misses"] += found == 0
        self._leave(message, message.lookup_id, memory)
        answer = BlocksFound(
            lookup_id=message.lookup_id,
            kv_tier=self.instance,
            num_blocks=found,
            num_loaded=loaded,
        )
        self.publish(inbox(message.worker), answer)

    def _stored(self, message: StoreBlocks, memory: BorrowedSlots | None, present: int) -> None:
        self._leave(message, message.store_id, memory)
        answer = BlocksStored(store_id=message.store_id, kv_tier=self.instance, num_blocks=present)
        self.publish(inbox(message.worker), answer)

    def _enter(self, worker: str, generation: int) -> bool:
        """False = this message is a duplicate of one in hand."""
        if (worker, generation) in self._in_hand:
            return False
        self._in_hand.add((worker, generation))
        return True

    def _borrow(self, message: LookupBlocks | StoreBlocks, generation: int) -> BorrowedSlots | None:
        return self.lenders.use(message.worker, message.lent, message.slots, generation)

    def _leave(
        self,
        message: LookupBlocks | StoreBlocks,
        generation: int,
        memory: BorrowedSlots | None,
    ) -> None:
        """Nobody is at work on its slots any more."""
        self._in_hand.discard((message.worker, generation))
        if memory is not None:
            memory.give_back(message.slots, generation)

    def _return(self, message: ReturnSlots) -> None:
        for generation, slots in zip(message.generations, message.slots, strict=False):
            if (message.worker, generation) in self._in_hand:
                continue
            memory = self.lenders.use(message.worker, message.lent, slots, generation)
            if memory is not None:
                self.counts["returned_late"] += len(slots)
                memory.give_back(slots, generation)

    async def _done(self) -> None:
        tasks = {*self._lookups, *([self._writer] if self._writer else [])}
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._lookups.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._raised(error, handling="task")  # our bug


def _us_since(started: float) -> int:
    return round(1e6 * (time.monotonic() - started))


def main(launch: Launch) -> None:
    run_service(launch, KvTier)
