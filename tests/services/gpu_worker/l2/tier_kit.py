"""A kv_tier in memory over real slots, and a worker that talks to it."""

import os
from collections import Counter
from typing import Any

import msgspec

from services.gpu_worker.config import SimConfig
from shared.ids import pack_ids
from shared.kv import BLOCK_SIZE, HASH_SIZE, BlockHash
from shared.messages import (
    Beat,
    BlocksFound,
    BlocksStored,
    Lent,
    LookupBlocks,
    ReturnSlots,
    StoreBlocks,
)
from shared.sampling import SamplingParams
from shared.slots import BorrowedSlots, host
from shared.subjects import inbox
from tests.services.gpu_worker.engine_kit import Worker

LONG = [(7 * i) % 900 for i in range(40 * BLOCK_SIZE + 5)]
SAMPLING = SamplingParams(max_tokens=40, seed=7)
L2 = {"l2_insure_ms": 0.0, "l2_min_blocks": 0}
SIM = SimConfig(num_blocks=300, max_model_len=4800, vocab_size=1000, output_tokens_max=0)
Question = LookupBlocks | StoreBlocks | ReturnSlots


class Tier:
    """Holds blocks as they came. `refuse`: touches no slot, and so gives none back."""

    def __init__(self, instance: str = "kv-1", pid: int = 0) -> None:
        self.instance = instance
        self.pid = pid or os.getpid()
        self.blocks: dict[BlockHash, bytes] = {}
        self.used: list[BlockHash] = []
        self.asked: list[Question] = []
        self.rejected = 0
        self._maps: dict[Lent, BorrowedSlots] = {}

    def beat(self, **changes: Any) -> Beat:
        beat = Beat(instance=self.instance, role="kv_tier", seq=1, host=host(), pid=self.pid)
        return msgspec.structs.replace(beat, **changes)

    def lookups(self) -> list[LookupBlocks]:
        return [message for message in self.asked if isinstance(message, LookupBlocks)]

    def answer(self, message: Question) -> list[BlocksFound | BlocksStored]:
        """What a faultless one says."""
        self.asked.append(message)
        match message:
            case LookupBlocks():
                return [self._find(message)]
            case StoreBlocks():
                return [self._store(message)]
            case ReturnSlots():
                for generation, slots in zip(message.generations, message.slots, strict=True):
                    memory = self._memory(message.lent)
                    if memory.may_use(slots, generation):
                        memory.give_back(slots, generation)
                return []

    def _find(self, message: LookupBlocks) -> BlocksFound:
        found = []
        for name in _names(message.block_hashes):
            if name not in self.blocks:
                break
            found.append(self.blocks[name])
        assert message.lent is not None
        memory, slots = self._memory(message.lent), message.slots
        loaded = found[: len(slots)] if len(found) >= message.min_blocks else []
        if not memory.may_use(slots, message.lookup_id):
            self.rejected += 1
            loaded = []
        else:
            for slot, data in zip(slots, loaded, strict=False):
                memory.payload(slot)[:] = data
            memory.give_back(slots, message.lookup_id)
        return BlocksFound(
            lookup_id=message.lookup_id,
            kv_tier=self.instance,
            num_blocks=len(found),
            num_loaded=len(loaded),
        )

    def _store(self, message: StoreBlocks) -> BlocksStored:
        used = _names(message.used)
        self.used += used
        names = _names(message.block_hashes)
        assert message.lent is not None
        memory = self._memory(message.lent)
        assert len(names) == len(message.slots)
        if not memory.may_use(message.slots, message.store_id):
            self.rejected += 1
            names = []
        for slot, name in zip(message.slots, names, strict=False):
            self.blocks[name] = bytes(memory.payload(slot))
        memory.give_back(message.slots, message.store_id)
        present = len(names) + sum(name in self.blocks for name in used)
        return BlocksStored(store_id=message.store_id, kv_tier=self.instance, num_blocks=present)

    def _memory(self, lent: Lent) -> BorrowedSlots:
        if lent not in self._maps:
            self._maps[lent] = BorrowedSlots.open(lent)
        return self._maps[lent]


class L2Worker(Worker):
    """A worker that has heard a tier; `go` lets both work until nothing is left to do."""

    def __init__(self, tier: Tier | None, sim: SimConfig = SIM, **config: Any) -> None:
        super().__init__(sim, **({"lease_s": 1e9} | L2 | config))
        if tier is not None:
            self.hear(tier)

    @property
    def counters(self) -> Counter[str]:
        return Counter(self.core.stats())

    def hear(self, tier: Tier, **changes: Any) -> None:
        self.core.receive(tier.beat(**changes), self.now)

    def tick(self, seconds: float = 0.0) -> None:
        self.now += seconds
        self.core.tick(self.now)

    def questions(self, tier: Tier) -> list[Question]:
        """What it has sent to this tier; other messages stay in the outbox."""
        found = []
        for subject, message in self.core.outbox.take():
            if subject == inbox(tier.instance):
                found.append(message)
            else:
                self.core.outbox.put(subject, message)
        return found

    def exchange(self, tier: Tier) -> int:
        """Everything asked is answered at once."""
        questions = self.questions(tier)
        for question in questions:
            for answer in tier.answer(question):
                self.core.receive(answer, self.now)
        return len(questions)

    def go(self, tier: Tier, steps: int = 100_000) -> None:
        """Steps, and after each all messages, until there is nothing left to do."""
        for _ in range(steps):
            self.hear(tier)
            self.tick()
            asked = self.exchange(tier)
            self.core.tick(self.now)
            stepped = self.core.step(self.now)
            self.core.batcher.check_integrity()
            self.now += 0.02
            wake_at = self.core.wake_at(self.now)
            if not (asked or stepped) and (wake_at is None or wake_at > self.now):
                return

    def wait(self, tier: Tier) -> None:
        """8 s in which each answer takes 0.2, and no step is taken."""
        for _ in range(40):
            self.tick(0.2)
            self.hear(tier)
            self.exchange(tier)
            self.tick()

    @property
    def slots_away(self) -> int:
        """In the engine's hands, or lent."""
        lending = self.core._l2._link.lending
        return lending.num_slots - lending.num_free

    def settle(self, tier: Tier) -> None:
        """Write what waits to be written."""
        for _ in range(100):
            self.hear(tier)
            self.tick(0.2)
            self.exchange(tier)


def asked(**changes: Any) -> dict[str, Any]:
    """A leg of 40 whole blocks and 5 ids."""
    return {"prompt_ids": pack_ids(LONG), "sampling": SAMPLING} | changes


def warm(tier: Tier, **changes: Any) -> list[int]:
    """Another worker computes that leg and stores it; the ids it makes."""
    worker = L2Worker(tier)
    worker.run(**asked(**changes))
    worker.go(tier)
    worker.settle(tier)
    return worker.take().ids


def _names(packed: bytes) -> list[BlockHash]:
    assert len(packed) % HASH_SIZE == 0
    return [packed[at : at + HASH_SIZE] for at in range(0, len(packed), HASH_SIZE)]
