"""Slots are touched only while they are lent for the message in hand, and always given back."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE

import msgspec
from redis import Redis

from deploy.servers import Running, Server
from shared.messages import Lent, LookupBlocks, StoreBlocks
from shared.testing import MemoryBroker, eventually
from tests.services.kv_tier.kit import FINGERPRINT, HASHES, Lender, content, key, serving, tier_on


async def test_messages_that_come_twice_or_late_touch_nothing(
    redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """A duplicate beside its first is dropped; after it, its slots are another's already."""
    async with serving(tier_on(broker, redis_server.url)) as tier:
        offer = worker.offer([0])
        worker.send(offer)
        worker.send(offer)
        await worker.answered(offer)
        assert tier.stats()["duplicates"] == 1
        _, slots = worker.lend(32)  # all, so also the one of `offer`
        for slot in slots:
            worker.slots.payload(slot)[:] = content(7)
        late = LookupBlocks(
            lookup_id=offer.store_id,
            worker=worker.name,
            block_hashes=offer.block_hashes,
            fingerprint=FINGERPRINT,
            lent=offer.lent,
            slots=offer.slots,
        )
        for message in (offer, late):
            worker.answers.clear()
            worker.send(message)
            await eventually(lambda: bool(worker.answers))
        assert tier.stats()["refused_slots"] == 2
        assert all(bytes(worker.slots.payload(slot)) == content(7) for slot in slots)
        assert not worker.slots.returned(slots)
        worker.slots.release(slots)
        assert await worker.load([0]) == [content(0)]


async def test_slots_of_a_lost_message_come_back(
    redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """And if it was only late, it finds them given back."""
    async with serving(tier_on(broker, redis_server.url)) as tier:
        lost = worker.offer([0, 1])
        worker.send(worker.give_up(lost))
        await eventually(lambda: worker.slots.returned(lost.slots))
        assert (await worker.ask(lost)).num_blocks == 0
        assert not redis.exists(key(0))
        assert tier.stats()["refused_slots"] == 1


async def test_slots_at_work_are_kept_until_the_end(
    own: Running, broker: MemoryBroker, worker: Lender
) -> None:
    """A worker that asks for them early gets them when nobody writes to them any more."""
    async with serving(tier_on(broker, own.server.url, answer_s=0.3)) as tier:
        os.kill(own.process.pid, signal.SIGSTOP)
        message = worker.lookup(HASHES, 4)
        worker.send(message)
        worker.send(worker.give_up(message))
        worker.send(message)
        await eventually(lambda: tier.stats().get("duplicates", 0) == 1)
        assert not worker.slots.returned(message.slots)
        assert (await worker.answered(message)).num_loaded == 0
        os.kill(own.process.pid, signal.SIGCONT)


async def test_under_pressure_the_oldest_is_dropped(
    own: Running, broker: MemoryBroker, worker: Lender
) -> None:
    """Each is answered, and all slots come back; beyond `max_lookups` a lookup is a miss."""
    tier = tier_on(broker, own.server.url, max_stores=2, max_lookups=2, answer_s=0.3, store_s=0.3)
    async with serving(tier):
        os.kill(own.process.pid, signal.SIGSTOP)
        messages = [
            *[worker.offer([number]) for number in range(6)],
            *[worker.lookup(HASHES[:1], 1) for _ in range(6)],
        ]
        for message in messages:
            worker.send(message)
        await eventually(lambda: tier.stats().get("dropped_lookups", 0) == 4)
        assert tier.stats()["dropped_stores"] >= 3
        for message in messages:
            await worker.answered(message)
        os.kill(own.process.pid, signal.SIGCONT)


DYING = """
import sys
from shared.slots import OwnSlots
slots = OwnSlots(4, 4096)
lent = slots.lent
print(lent.pid, lent.fd, lent.num_slots, lent.slot_bytes, flush=True)
for number in (1, 2):
    sys.stdin.readline()
    slots.payload(number)[:] = bytes([number]) * 4096
    slots.lend([number], number)
    print(number, flush=True)
sys.stdin.read()
"""


async def test_a_dead_worker_has_what_it_handed_over_written(
    redis: Redis, redis_server: Server, broker: MemoryBroker, worker: Lender
) -> None:
    """Its memory stays mapped for a while; then it is dropped, and a stranger's is never opened."""
    async with serving(tier_on(broker, redis_server.url)) as tier:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DYING, stdin=PIPE, stdout=PIPE
        )
        assert process.stdin is not None
        assert process.stdout is not None
        lent = Lent(*map(int, (await process.stdout.readline()).split()))
        for number in (1, 2):
            process.stdin.write(b"\n")
            await process.stdout.readline()
            if number == 2:
                process.kill()
                await process.wait()
            offer = StoreBlocks(
                store_id=number,
                worker=worker.name,
                block_hashes=HASHES[number],
                fingerprint=FINGERPRINT,
                lent=lent,
                slots=[number],
            )
            worker.send(offer)
            await eventually(lambda number=number: number in worker.answers)
            assert worker.answers[number][0].num_blocks == 1
        assert redis.getrange(key(2), 64, -1) == bytes([2]) * 4096
        assert tier.stats()["mapped_workers"] == 1
        tier.lenders.sweep(tier.clock())
        tier.lenders.sweep(tier.clock() + 2.0)
        assert tier.stats()["mapped_workers"] == 0
        worker.answers.clear()
        worker.send(msgspec.structs.replace(offer, block_hashes=HASHES[3]))
        await eventually(lambda: bool(worker.answers))
        assert not redis.exists(key(3))
        assert tier.stats()["refused_slots"] == 1
