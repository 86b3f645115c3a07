"""Blocks that legs have computed, from L1 into L2, behind the steps. Pure but for the copies.

What waits is a name: if its block is gone from L1 when its turn comes there is nothing to write. A
leg is written once computing it again would take longer than `l2_insure_ms`, from its first block
on; and only up to an id that the model was sound at, since whatever spoils a block spoils the ids
after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from services.gpu_worker.batcher import Batcher
from services.gpu_worker.l2.lending import Loan
from services.gpu_worker.l2.link import Known, Link, Tier
from services.gpu_worker.sequence import Sequence
from shared.breaker import Permit
from shared.kv import HASH_SIZE, BlockHash
from shared.messages import BlocksStored, StoreBlocks

_BATCH = 8  # blocks that are worth a message,
_BATCH_S = 0.1  # or fewer after so long: they are what a death of this worker would cost
_BATCH_MAX = 64
_ANSWER_S = 2.0  # nobody waits, but then the slots are asked for
_USED_S = 60.0  # between two times that L2 is told what running legs need; it keeps that for 120 s
_FORGET_S = 60.0  # an id may take twice as long as so long ago
_USED_MAX = 4096  # blocks named in one message: 64 KiB


@dataclass(slots=True, frozen=True)
class _Store:
    names: list[BlockHash]
    loan: Loan
    permit: Permit
    overdue_at: float
    num_used: int


class Stores:
    """`offer` what a leg has computed; `tick` writes it, and `stored` takes the answers."""

    def __init__(self, link: Link, batcher: Batcher, known: Known) -> None:
        self._link = link
        self._batcher = batcher
        self._known = known
        self._queue: dict[BlockHash, None] = {}  # oldest first
        self._begun_at = 0.0  # since when the queue is not empty
        self._in_hand: dict[int, _Store] = {}
        self._use_at = 0.0
        self._has_holes = False  # L2 lacks what it was given; blocks after a hole are of no use
        self._id_s = self._id_at = 0.0  # what a prompt id takes, and when that was said

    def offer(self, sequence: Sequence, now: float) -> None:
        """Its full blocks are sound."""
        num_full = sequence.num_computed_tokens // self._link.spec.block_size
        if num_full <= sequence.num_offered or sequence.private:
            return
        if not sequence.num_offered and not self._is_worth(sequence, now):
            return
        if not self._queue:
            self._begun_at = now
        for name in sequence.block_hashes[sequence.num_offered : num_full]:
            if not self._known.has(name, now):
                self._queue[name] = None
        sequence.num_offered = num_full
        while len(self._queue) > self._link.config.l2_queue_blocks:
            del self._queue[next(iter(self._queue))]
            self._link.counters["l2_dropped_blocks"] += 1

    def stored(self, message: BlocksStored, now: float) -> None:
        """An answer; what was not stored is offered again, with all else, in `_USED_S`."""
        store = self._in_hand.pop(message.store_id, None)
        if store is None:
            self._link.counters["l2_late"] += 1
            return
        store.permit.end(True, now)
        if not self._link.lending.settle(store.loan):
            self._link.counters["l2_rejected"] += 1
            return
        self._link.lending.release(store.loan.slots)
        self._has_holes |= message.num_blocks < len(store.names) + store.num_used
        count = max(0, min(message.num_blocks, len(store.names)))
        self._link.counters["l2_stored_blocks"] += count
        self._link.counters["l2_dropped_blocks"] += len(store.names) - count
        if count == len(store.names):
            self._known.mark(store.names, now)

    def tick(self, now: float, budget: int) -> None:
        """Write at most `budget` blocks."""
        for generation, store in list(self._in_hand.items()):
            if now >= store.overdue_at:
                del self._in_hand[generation]
                self._link.lending.abandon(store.loan)
                store.permit.end(False, now)
                self._has_holes = True
                self._link.counters["l2_timeouts"] += 1
                self._link.counters["l2_dropped_blocks"] += len(store.names)
        if self._queue and (len(self._queue) >= _BATCH or now - self._begun_at >= _BATCH_S):
            self._write(now, min(budget, _BATCH_MAX, self._num_slots()))
        if now >= self._use_at and self._link.tier(now) is not None:
            self._use_at = now + _USED_S
            if self._has_holes:
                self._offer_again(now)
            else:
                self._use(now)

    def wake_at(self, now: float) -> float | None:
        times = [store.overdue_at for store in self._in_hand.values()]
        if self._queue and self._num_slots() and self._link.tier(now) is not None:
            times.append(self._begun_at + _BATCH_S)
        return min(times, default=None)

    def _is_worth(self, sequence: Sequence, now: float) -> bool:
        """By the least that an id took lately: where others use the CPUs, too, all seems dear, and
        writing would take from what is left.
        """
        id_s = self._batcher.pace.prompt_id_s
        if self._id_s:
            id_s = min(id_s, self._id_s * (1 + (now - self._id_at) / _FORGET_S))
        self._id_s, self._id_at = id_s, now
        return 1000 * sequence.num_computed_tokens * id_s >= self._link.config.l2_insure_ms

    def _num_slots(self) -> int:
        """That may be used now: half of all are for loads, for which legs wait."""
        lending = self._link.lending
        used = sum(len(store.names) for store in self._in_hand.values())
        return min(lending.num_free, lending.num_slots // 2 - used - lending.num_overdue)

    def _write(self, now: float, count: int) -> None:
        entered = self._link.enter(now) if count > 0 else None
        if entered is None:
            self._begun_at = now
            return
        tier, permit = entered
        found = self._next(now, count)
        slots = self._link.lending.take(len(found))
        for slot, block in zip(slots, found.values(), strict=True):
            self._link.copy_out(block, slot)
        self._begun_at = now
        if found:
            self._send(tier, permit, now, names=[*found], slots=slots)
        else:
            permit.end(None, now)

    def _next(self, now: float, count: int) -> dict[BlockHash, int]:
        """Up to `count` blocks of the queue that are still here."""
        found: dict[BlockHash, int] = {}
        while self._queue and len(found) < count:
            name = next(iter(self._queue))
            del self._queue[name]
            if self._known.has(name, now):
                continue
            if blocks := self._batcher.pool.lookup([name]):
                found[name] = blocks[0]
            else:
                self._link.counters["l2_dropped_blocks"] += 1
        return found

    def _offer_again(self, now: float) -> None:
        """All that running legs would need; L2 says which of it is there."""
        self._has_holes = False
        self._known.forget()
        for entry in self._batcher.running:
            if entry.sequence.num_offered:
                entry.sequence.num_offered = 0
                self.offer(entry.sequence, now)

    def _use(self, now: float) -> None:
        """Ask L2 to keep what running legs would need again."""
        running = (entry.sequence for entry in self._batcher.running)
        names = [name for name in dict.fromkeys(_offered(running)) if name not in self._queue]
        for start in range(0, len(names), _USED_MAX):
            entered = self._link.enter(now)
            if entered is None:
                return
            used = b"".join(names[start : start + _USED_MAX])
            self._send(*entered, now, used=used)

    def _send(
        self,
        tier: Tier,
        permit: Permit,
        now: float,
        *,
        names: list[BlockHash] | None = None,
        slots: list[int] | None = None,
        used: bytes = b"",
    ) -> None:
        spec, lending = self._link.spec, self._link.lending
        loan = lending.lend(slots or [], tier.borrower)
        message = StoreBlocks(
            store_id=loan.generation,
            worker=self._link.worker,
            block_hashes=b"".join(names or []),
            fingerprint=spec.kv_fingerprint,
            lent=lending.lent,
            slots=loan.slots,
            dtype=spec.kv_dtype,
            used=used,
        )
        self._link.send(tier.borrower, message)
        self._in_hand[loan.generation] = _Store(
            names or [], loan, permit, now + _ANSWER_S, len(used) // HASH_SIZE
        )


def _offered(sequences: Iterable[Sequence]) -> Iterable[BlockHash]:
    for sequence in sequences:
        yield from sequence.block_hashes[: sequence.num_offered]
