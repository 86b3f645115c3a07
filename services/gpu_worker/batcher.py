"""Which sequences compute how many ids in the next step. Pure policy over the block pool."""

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from services.gpu_worker.block_pool import BlockPool
from services.gpu_worker.kv_policy import FULL, KvPolicy
from services.gpu_worker.pace import Pace
from services.gpu_worker.runner import Outcome, Scheduled
from services.gpu_worker.sequence import Sequence
from shared.kv import BlockHash, extend_hash
from shared.messages import LegState


@dataclass(slots=True, eq=False)
class Entry:
    """A sequence and its place in the order: lower priority number first, then who comes with ids
    that a reader has (a stream that another worker has lost stands still), then arrival.
    """

    sequence: Sequence
    priority: int
    arrival: int
    alone: bool
    resumed: bool
    ready: bool  # may be admitted: L2 was asked for what it lacks, or is not to be
    num_kept: int = 0  # blocks of its prefix that were here then
    asked_again: bool = False
    running: bool = False
    preempted: bool = False

    @property
    def order(self) -> tuple[int, bool, int]:
        return (self.priority, not self.resumed, self.arrival)

    @property
    def num_missing(self) -> int:
        """Known ids that are not computed; 1 = the next step decodes."""
        return self.sequence.num_tokens - self.sequence.num_computed_tokens

    @property
    def stands_still(self) -> bool:
        """Whether a reader waits for its next id until a prefill is done."""
        return self.num_missing > 1 and bool(self.sequence.output_ids)


def in_order(entry: Entry) -> tuple[int, bool, int]:
    """Sort key of `Batcher.waiting` and `Batcher.running`."""
    return entry.order


class Batcher:
    """Continuous batching with chunked prefill under a token budget.

    A *running* sequence holds blocks for all its known ids; a *waiting* one holds none. When blocks
    run out, the last in order is preempted: it keeps its ids, gives up its blocks and recomputes
    later (or finds its own blocks still cached). The first in order always moves, so all end.
    """

    def __init__(
        self,
        pool: BlockPool,
        pace: Pace,
        *,
        max_legs: int,
        max_batched_tokens: int,
        policy: KvPolicy = FULL,
    ) -> None:
        assert max_batched_tokens >= max_legs >= 1
        self.pool = pool
        self.pace = pace
        self.policy = policy
        self.max_legs = max_legs
        self.max_batched_tokens = max_batched_tokens
        self.waiting: list[Entry] = []
        self.running: list[Entry] = []
        self.num_preemptions = 0
        self.tokens: Counter[str] = Counter()  # of legs that begin: queried, l1_hit, l2_hit; and
        # recomputed: of legs that had been computed before, here or elsewhere
        self.asks_first = False  # who comes, or is preempted, waits for `admit`: L2 may have blocks
        self._entries: dict[Sequence, Entry] = {}
        self._arrivals = 0

    def add(self, sequence: Sequence, *, priority: int = 0, alone: bool = False) -> None:
        """Queue `sequence`; the caller has checked that it fits the pool when alone in it.

        `alone` = until its first new id it runs only while nothing else runs here, so that it harms
        nobody.
        """
        resumed = bool(sequence.output_ids)
        ready = not self.asks_first
        entry = Entry(sequence, priority, self._arrivals, alone, resumed, ready)
        self._arrivals += 1
        self._entries[sequence] = entry
        insort(self.waiting, entry, key=in_order)

    def remove(self, sequence: Sequence, *, forget: bool = False) -> None:
        """Drop `sequence` and its blocks; `forget` = nobody may reuse what they hold."""
        entry = self._entries.pop(sequence)
        if forget:
            self.pool.forget(sequence.block_table)
        if entry.running:
            self._stop(entry)
        else:
            self.waiting.remove(entry)

    def state(self, sequence: Sequence) -> LegState:
        """What it does: `prefill`, `decode`, or `paused` when it was preempted and waits."""
        entry = self._entries[sequence]
        if entry.running:
            return "decode" if entry.num_missing == 1 else "prefill"
        return "paused" if entry.preempted else "prefill"

    def waits(self, sequence: Sequence) -> bool:
        """Whether it holds no blocks: not begun, or preempted."""
        return not self._entries[sequence].running

    def num_reusable_tokens(self, sequence: Sequence) -> int:
        """How many ids of `sequence` the prefix cache holds now."""
        return len(self._cached_prefix(sequence)) * self.pool.block_size

    def unasked(self) -> list[Sequence]:
        """The first of those that wait for `admit`."""
        return [entry.sequence for entry in self.waiting[: self.max_legs] if not entry.ready]

    def admit(self, sequence: Sequence) -> None:
        """What L2 could give it is here: it may begin when its turn comes. If by then others have
        taken some of that, it is asked for again, once.
        """
        entry = self._entries[sequence]
        entry.ready = True
        entry.num_kept = self.keep(sequence)

    def prefix(self, sequence: Sequence) -> tuple[list[int], list[BlockHash]]:
        """The blocks of its prefix that are here, and the names of the others it could use."""
        cached = self._cached_prefix(sequence)
        return cached, sequence.block_hashes[len(cached) : self._num_reusable(sequence)]

    def keep(self, sequence: Sequence) -> int:
        """Evict what is here of its prefix after all others, its end before its start; how many
        blocks.
        """
        cached = self._cached_prefix(sequence)
        self.pool.share(cached)
        self.pool.release(cached)
        return len(cached)

    @property
    def num_prefill_tokens(self) -> int:
        """Ids that wait to be computed before their sequences can decode."""
        entries = self._entries.values()
        return sum(e.num_missing for e in entries if not e.running or e.num_missing > 1)

    def schedule(self) -> list[Scheduled]:
        """The rows of the next step, decode rows first. Empty = nothing to do."""
        # Decode: one id each. A victim comes after the row that needs its blocks, so no row that
        # is already in the batch loses them.
        batch = [
            Scheduled(entry.sequence, 1)
            for entry in [e for e in self.running if e.num_missing == 1]
            if entry.running and self._grow(entry)
        ]

        # Prefill: the budget goes down the order, part-way prompts and new ones alike. The first
        # that cannot be admitted holds back those after it, or it would starve.
        budget = self._prefill_budget(len(batch))
        prefilling = [e for e in self.running if e.num_missing > 1]
        admitting = True
        computing: set[BlockHash] = set()
        for entry in sorted([*prefilling, *self.waiting], key=in_order):
            if budget == 0:
                break
            if not entry.running:
                if not (admitting and entry.ready):
                    continue
                cached = self._cached_prefix(entry.sequence)
                if self._next_name(entry.sequence, cached) in computing:
                    continue  # an earlier row computes that block; share it in a later step
                admitting = self._may_admit(entry, cached)
                if not admitting or self._asks_again(entry, cached):
                    continue
                self._admit(entry, cached)
            num_tokens = min(budget, entry.num_missing)
            batch.append(Scheduled(entry.sequence, num_tokens))
            budget -= num_tokens
            computing.update(self._names_to_come(entry.sequence))
        return batch

    def commit(self, batch: list[Scheduled], outcomes: list[Outcome]) -> None:
        """Take the outcome of `schedule`'s batch; rows with a fault stay as they were."""
        for row, outcome in zip(batch, outcomes, strict=True):
            if outcome.fault:
                continue
            sequence = row.sequence
            first_block = sequence.num_computed_tokens // self.pool.block_size
            sequence.num_computed_tokens += row.num_tokens
            if sequence.scores is not None:
                sequence.scores += outcome.scores
            if outcome.token_id is not None:
                sequence.output_ids.append(outcome.token_id)
                self._entries[sequence].alone = False  # it has done no harm where harm was feared
            self._name_full_blocks(sequence, first_block)
            if self.policy.lossy:
                self._drop_out_of_sight(sequence)

    def check_integrity(self) -> None:
        """Assert that the blocks of the running sequences are all the used blocks there are."""
        self.pool.check_integrity()
        entries = [*self.running, *self.waiting]
        assert len(entries) == len(self._entries)
        held = {block for entry in self.running for block in entry.sequence.block_table}
        assert len(held) == self.pool.num_blocks - self.pool.num_available
        assert not any(entry.sequence.block_table for entry in self.waiting)
        assert len(self.running) <= self.max_legs

    # --- admission ---

    def _prefill_budget(self, decoding: int) -> int:
        """What the pace leaves beside rows that decode. Streams that stand still are paced for
        nobody: they have waited longer than those that are held up.
        """
        limit = self.max_batched_tokens - decoding
        entries = self._entries.values()
        if any(e.stands_still and (e.running or e.ready) for e in entries):
            return limit
        return self.pace.num_prompt_ids(decoding, limit)

    def _may_admit(self, entry: Entry, cached: list[int]) -> bool:
        if len(self.running) >= self.max_legs:
            return False
        if self.running and (entry.alone or self.running[0].alone):
            return False
        # Leave every running leg a block to grow into, or the newcomer is soon preempted again.
        needed = self._blocks_for(entry.sequence) - len(cached) + self.pool.num_unused(cached)
        return self.pool.num_available - needed >= len(self.running)

    def _asks_again(self, entry: Entry, cached: list[int]) -> bool:
        if len(cached) >= entry.num_kept or entry.asked_again:
            return False
        entry.asked_again, entry.ready = True, False
        return True

    def _admit(self, entry: Entry, cached: list[int]) -> None:
        sequence = entry.sequence
        self.pool.share(cached)
        fresh = self.pool.allocate(self._blocks_for(sequence) - len(cached))
        sequence.block_table = cached + fresh
        sequence.num_computed_tokens = len(cached) * self.pool.block_size
        self._count(entry)
        entry.running = True
        self.waiting.remove(entry)
        insort(self.running, entry, key=in_order)

    def _count(self, entry: Entry) -> None:
        sequence, tokens = entry.sequence, self.tokens
        found = sequence.num_computed_tokens
        if not entry.preempted:
            sequence.num_cached_tokens = found
            loaded = min(found, sequence.num_loaded_tokens)
            tokens["queried"] += sequence.num_tokens
            tokens["l1_hit"] += found - loaded
            tokens["l2_hit"] += loaded
        if entry.preempted or entry.resumed:
            tokens["recomputed"] += sequence.num_tokens - found

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the known prefix whose logits nobody needs."""
        if sequence.private:
            return []
        self._extend_names(sequence)
        return self.pool.lookup(sequence.block_hashes[: self._num_reusable(sequence)])

    def _num_reusable(self, sequence: Sequence) -> int:
        return 0 if sequence.private else sequence.num_skippable // self.pool.block_size

    def _next_name(self, sequence: Sequence, cached: list[int]) -> BlockHash | None:
        more = len(cached) < self._num_reusable(sequence)
        return sequence.block_hashes[len(cached)] if more else None

    def _names_to_come(self, sequence: Sequence) -> Iterable[BlockHash]:
        if sequence.private:
            return []
        return sequence.block_hashes[sequence.num_computed_tokens // self.pool.block_size :]

    # --- blocks ---

    def _grow(self, entry: Entry) -> bool:
        """Make room for the next id; False = `entry` itself had to be preempted."""
        table = entry.sequence.block_table
        if len(table) == self._blocks_for(entry.sequence):
            return True
        while self.pool.num_available == 0:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is entry:
                return False
        table += self.pool.allocate(1)
        return True

    def _preempt(self, entry: Entry) -> None:
        self._stop(entry)
        entry.preempted = True
        entry.ready, entry.num_kept, entry.asked_again = not self.asks_first, 0, False
        self.num_preemptions += 1
        insort(self.waiting, entry, key=in_order)

    def _stop(self, entry: Entry) -> None:
        sequence = entry.sequence
        self.running.remove(entry)
        entry.running = False
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_dropped_blocks = 0
        sequence.num_computed_tokens = 0

    def _blocks_for(self, sequence: Sequence) -> int:
        """For all known ids, or as many as it ever holds."""
        count = -(-sequence.num_tokens // self.pool.block_size) - sequence.num_dropped_blocks
        return min(count, self.policy.blocks_max) if self.policy.lossy else count

    def _drop_out_of_sight(self, sequence: Sequence) -> None:
        """Give back what nobody will see, or go on in it: a long prompt needs no more blocks."""
        policy, table = self.policy, sequence.block_table
        out = policy.num_out_of_sight(sequence.num_computed_tokens)
        place = slice(policy.sink_blocks, policy.sink_blocks + out - sequence.num_dropped_blocks)
        dropped = table[place]
        del table[place]
        sequence.num_dropped_blocks = out
        wanted = max(0, self._blocks_for(sequence) - len(table))
        table += dropped[:wanted]
        self.pool.release(dropped[wanted:])

    def _extend_names(self, sequence: Sequence) -> None:
        names, size = sequence.block_hashes, self.pool.block_size
        while (len(names) + 1) * size <= sequence.num_tokens:
            parent = names[-1] if names else b""
            ids = sequence.ids_from(len(names) * size, size)
            names.append(extend_hash(parent, ids, sequence.salt))

    def _name_full_blocks(self, sequence: Sequence, first: int) -> None:
        end = sequence.num_computed_tokens // self.pool.block_size
        if sequence.private or first == end:
            return
        self._extend_names(sequence)
        for index in range(first, end):
            self.pool.name(sequence.block_table[index], sequence.block_hashes[index], sequence.salt)
