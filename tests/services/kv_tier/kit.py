"""A worker that lends slots and asks a kv_tier over a bus in memory; a Redis of its own."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterable
from typing import Any

import msgspec

from services.kv_tier.blocks import block_key
from services.kv_tier.service import KvTier
from shared.bus import Delivery
from shared.messages import (
    BlocksFound,
    BlocksStored,
    LookupBlocks,
    ReturnSlots,
    StoreBlocks,
    encode,
)
from shared.slots import OwnSlots
from shared.subjects import inbox
from shared.testing import MemoryBroker, MemoryBus, eventually, running
from tests.services.launches import launch_of

TIER = "kv_tier-0-a"
FINGERPRINT = b"model-model-mode"
BLOCK = 4096
HASHES = [bytes([n]) * 16 for n in range(32)]
Answer = BlocksFound | BlocksStored


def content(number: int, size: int = BLOCK) -> bytes:
    """What a block holds: no two alike."""
    return random.Random(number).randbytes(size)


def key(number: int) -> bytes:
    return block_key(FINGERPRINT, HASHES[number])


def tier_on(broker: MemoryBroker, *urls: str, **settings: Any) -> KvTier:
    patient = {"answer_s": 5.0, "store_s": 5.0, "connect_s": 5.0} | settings
    launch = launch_of("kv_tier", TIER, patient, redis_url=",".join(urls))
    return KvTier(launch, MemoryBus(broker))


@contextlib.asynccontextmanager
async def serving(tier: KvTier) -> AsyncIterator[KvTier]:
    """As `running`, without the wait for what may still be on its way."""
    async with running(tier):
        yield tier
        tier.hurry()


class Lender:
    """A worker with slots."""

    def __init__(self, broker: MemoryBroker, num_slots: int = 32, slot_bytes: int = BLOCK) -> None:
        self.name = "worker-1"
        self.slots = OwnSlots(num_slots, slot_bytes)
        self.answers: dict[int, list[Answer]] = {}
        self._bus = MemoryBus(broker)
        self._generation = 0

    async def listen(self) -> "Lender":
        await self._bus.subscribe(inbox(self.name), self._on)
        return self

    def _on(self, delivery: Delivery) -> None:
        answer: Answer = msgspec.msgpack.decode(delivery.payload, type=Answer)
        number = answer.lookup_id if isinstance(answer, BlocksFound) else answer.store_id
        self.answers.setdefault(number, []).append(answer)

    def lend(self, count: int) -> tuple[int, list[int]]:
        self._generation += 1
        slots = self.slots.take(count)
        assert len(slots) == count
        self.slots.lend(slots, self._generation)
        return self._generation, slots

    def lookup(self, hashes: Iterable[bytes], slots: int = 0, **changes: Any) -> LookupBlocks:
        number, lent = self.lend(slots)
        message = LookupBlocks(
            lookup_id=number,
            worker=self.name,
            block_hashes=b"".join(hashes),
            fingerprint=FINGERPRINT,
            lent=self.slots.lent,
            slots=lent,
        )
        return msgspec.structs.replace(message, **changes)

    def offer(self, numbers: Iterable[int], **changes: Any) -> StoreBlocks:
        numbers = list(numbers)
        number, lent = self.lend(len(numbers))
        for slot, index in zip(lent, numbers, strict=True):
            self.slots.payload(slot)[:] = content(index, self.slots.slot_bytes)
        message = StoreBlocks(
            store_id=number,
            worker=self.name,
            block_hashes=b"".join(HASHES[index] for index in numbers),
            fingerprint=FINGERPRINT,
            lent=self.slots.lent,
            slots=lent,
            dtype="bf16",
        )
        return msgspec.structs.replace(message, **changes)

    def give_up(self, *messages: LookupBlocks | StoreBlocks) -> ReturnSlots:
        return ReturnSlots(
            worker=self.name,
            lent=self.slots.lent,
            generations=[number_of(message) for message in messages],
            slots=[message.slots for message in messages],
        )

    def send(self, message: LookupBlocks | StoreBlocks | ReturnSlots) -> None:
        self._bus.publish(inbox(TIER), encode(message))

    async def answered(self, message: LookupBlocks | StoreBlocks) -> Any:
        """Its answer, by when all its slots are back; they are free then."""
        number = number_of(message)
        await eventually(lambda: number in self.answers)
        assert self.slots.returned(message.slots)
        self.slots.release(message.slots)
        return self.answers[number][0]

    async def ask(self, message: LookupBlocks | StoreBlocks) -> Any:
        self.send(message)
        return await self.answered(message)

    async def store(self, *numbers: int) -> int:
        """How many of these blocks L2 has after that."""
        stored: BlocksStored = await self.ask(self.offer(numbers))
        return stored.num_blocks

    async def load(self, numbers: Iterable[int], **changes: Any) -> list[bytes]:
        """What came of these, from the first up to the first doubt."""
        numbers = list(numbers)
        message = self.lookup([HASHES[index] for index in numbers], len(numbers), **changes)
        found: BlocksFound = await self.ask(message)
        assert found.num_loaded <= found.num_blocks <= len(numbers)
        return [bytes(self.slots.payload(slot)) for slot in message.slots[: found.num_loaded]]


def number_of(message: LookupBlocks | StoreBlocks) -> int:
    return message.lookup_id if isinstance(message, LookupBlocks) else message.store_id


async def until_quiet(tier: KvTier) -> None:
    """All that was sent is handled."""
    await asyncio.sleep(0)
    await eventually(lambda: tier.beat().load == 0)
