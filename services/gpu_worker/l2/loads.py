"""Blocks that a leg lacks, from L2 into L1 before it begins. Pure but for the copies.

A leg waits at most `l2_answer_s`; what has not come by then it computes. A long prefix comes in
chunks: while one is copied the next are on their way, and each that comes renews the wait, up to
the time that computing it all would take. Nothing is allocated before it is here, and
never what running legs need to grow.
"""

from collections import deque
from dataclasses import dataclass, field

from services.gpu_worker.batcher import Batcher
from services.gpu_worker.l2.lending import Loan
from services.gpu_worker.l2.link import Known, Link
from services.gpu_worker.l2.worth import Worth
from services.gpu_worker.sequence import Sequence
from shared.breaker import Permit
from shared.kv import BlockHash
from shared.messages import BlocksFound, LookupBlocks

LOADS_MAX = 16  # legs that wait for their blocks; those behind them are asked for later
_LEFT_S = 0.05  # with less time left nobody is asked: it would not do, and prove nothing
_CHUNK = 32  # blocks of one lookup: some 10 MB
_AHEAD = 2  # lookups of one leg on their way


@dataclass(slots=True, eq=False)
class _Load:
    """What one leg waits for: `names`, which follow the prefix that L1 has."""

    sequence: Sequence
    deadline: float
    min_blocks: int
    latest: float = 0.0  # no later than this
    names: list[BlockHash] = field(default_factory=list)
    num_before: int = 0  # blocks of that prefix
    asked_at: float | None = None
    num_asked: int = 0  # of `names`
    num_found: int = 0  # of them, as far as it is known
    num_loaded: int = 0
    on_their_way: int = 0  # lookups
    landing: int = 0  # lookups that are being copied
    undisturbed: bool = True  # the engine did nothing else meanwhile
    in_time: bool = True
    is_over: bool = False


@dataclass(slots=True, eq=False)
class _Lookup:
    """Blocks `start`, ... of `load.names`, one per slot of `loan`."""

    load: _Load
    start: int
    loan: Loan
    permit: Permit
    given_s: float  # to answer
    num_here: int = 0  # of the slots
    num_copied: int = 0

    @property
    def next_block(self) -> int:
        return self.start + self.num_copied


class Loads:
    """Tell it of answers (`found`) and of legs that end (`forget`); `tick` does the rest."""

    def __init__(self, link: Link, batcher: Batcher, known: Known) -> None:
        self._link = link
        self._batcher = batcher
        self._known = known
        self._left_s = min(_LEFT_S, link.config.l2_answer_s / 2)
        self._worth = Worth(link.config.l2_min_blocks, link.spec.block_size)
        self._loads: dict[Sequence, _Load] = {}
        self._by_name: dict[BlockHash, _Load] = {}  # that will bring this block
        self._lookups: dict[int, _Lookup] = {}  # on their way
        self._landed: deque[_Lookup] = deque()

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._loads

    def forget(self, sequence: Sequence) -> None:
        """Its leg has ended."""
        if (load := self._loads.get(sequence)) is not None:
            self._close(load)

    def found(self, message: BlocksFound, now: float) -> None:
        """An answer: what it says is believed as far as it can be true."""
        lookup = self._lookups.pop(message.lookup_id, None)
        if lookup is None:
            self._link.counters["l2_late"] += 1
            return
        lookup.permit.end(True, now)
        load, slots = lookup.load, lookup.loan.slots
        load.on_their_way -= 1
        num_here = message.num_loaded
        possible = 0 <= num_here <= message.num_blocks <= len(load.names) - lookup.start
        in_our_hands = self._link.lending.settle(lookup.loan)
        if not (possible and in_our_hands and num_here <= len(slots)):
            self._link.counters["l2_rejected"] += 1
            load.num_found = min(load.num_found, lookup.start)
            if in_our_hands:
                self._link.lending.release(slots)
            return
        if lookup.start == 0:
            load.num_found = message.num_blocks
        if num_here < len(slots):  # the prefix ends there
            load.num_found = min(load.num_found, lookup.start + num_here)
        lookup.num_here = num_here
        if num_here:
            renewed = min(load.latest, now + self._link.config.l2_answer_s)
            load.deadline = max(load.deadline, renewed)
        load.landing += 1
        self._landed.append(lookup)

    def tick(self, now: float, budget: int, *, stepped: bool) -> int:
        """Copy at most `budget` blocks; how many."""
        if stepped:
            for load in self._loads.values():
                load.undisturbed = False
        self._expire(now)
        self._begin(now)
        self._advance(now)
        if not self._landed:
            return 0
        copied = self._copy(budget)
        self._advance(now)
        return copied

    def wake_at(self, now: float) -> float | None:
        unasked = self._batcher.unasked() if len(self._loads) < LOADS_MAX else []
        if any(sequence not in self._loads for sequence in unasked):
            return now
        return min((load.deadline for load in self._loads.values()), default=None)

    # --- one leg ---

    def _begin(self, now: float) -> None:
        for sequence in self._batcher.unasked():
            if sequence in self._loads:
                continue
            min_blocks = self._worth.min_blocks(self._batcher.pace.prompt_id_s, now)
            _, names = self._batcher.prefix(sequence)
            if min_blocks is None or len(names) < max(1, min_blocks):
                self._batcher.admit(sequence)
            elif len(self._loads) < LOADS_MAX:
                deadline = now + self._link.config.l2_answer_s
                self._loads[sequence] = _Load(sequence, deadline, max(1, min_blocks))

    def _advance(self, now: float) -> None:
        for load in list(self._loads.values()):
            if load.asked_at is None:
                waits = self._ask_first(load, now)
            else:
                self._ask_on(load, now)
                waits = load.on_their_way + load.landing > 0 or self._has_more(load, now)
            if not waits:
                self._finish(load, now)

    def _ask_first(self, load: _Load, now: float) -> bool:
        """Whether the leg is to wait: for an answer, for slots, for another that loads the same."""
        cached, names = self._batcher.prefix(load.sequence)
        if len(names) < load.min_blocks or self._link.tier(now) is None:
            return False
        if (other := self._by_name.get(names[0])) is not None:
            load.deadline = max(load.deadline, other.deadline)
            return True
        if load.deadline - now < self._left_s:
            return False
        load.names, load.num_before = names, len(cached)
        num_ids = len(names) * self._link.spec.block_size
        load.latest = now + num_ids * self._batcher.pace.prompt_id_s
        if not self._link.lending.num_free:
            return True
        if not self._ask(load, now):
            return False
        load.asked_at = now
        self._worth.asked(now)
        for name in names:
            self._by_name.setdefault(name, load)
        self._batcher.keep(load.sequence)
        return True

    def _has_more(self, load: _Load, now: float) -> bool:
        more = load.num_asked < load.num_found and load.deadline - now >= self._left_s
        return more and self._link.tier(now) is not None

    def _ask_on(self, load: _Load, now: float) -> None:
        while load.on_their_way < _AHEAD and self._has_more(load, now):
            if not self._ask(load, now):
                return

    def _ask(self, load: _Load, now: float) -> bool:
        """For the next blocks, if there are slots and somebody to ask."""
        lending, start, left_s = self._link.lending, load.num_asked, load.deadline - now
        entered = self._link.enter(now) if lending.num_free else None
        if entered is None:
            return False
        tier, permit = entered
        left = (load.num_found if start else len(load.names)) - start
        slots = lending.take(min(left, _CHUNK, lending.num_slots // 4))
        loan = lending.lend(slots, tier.borrower)
        load.num_asked += len(slots)
        names = load.names[start : load.num_asked] if start else load.names
        lookup = LookupBlocks(
            lookup_id=loan.generation,
            worker=self._link.worker,
            block_hashes=b"".join(names),
            fingerprint=self._link.spec.kv_fingerprint,
            lent=lending.lent,
            slots=slots,
            min_blocks=0 if start else load.min_blocks,
            deadline_ms=max(1, int(1000 * left_s)),
        )
        self._link.send(tier.borrower, lookup)
        self._link.counters["l2_lookups"] += 1
        self._lookups[loan.generation] = _Lookup(load, start, loan, permit, left_s)
        load.on_their_way += 1
        return True

    def _expire(self, now: float) -> None:
        for generation, lookup in list(self._lookups.items()):
            load = lookup.load
            if now < load.deadline:
                continue
            del self._lookups[generation]
            self._link.lending.abandon(lookup.loan)
            fair = lookup.given_s >= self._link.config.l2_answer_s / 2
            lookup.permit.end(False if fair else None, now)
            self._link.counters["l2_timeouts"] += 1
            load.on_their_way -= 1
            load.in_time = False
            load.num_found = min(load.num_found, lookup.start)

    def _finish(self, load: _Load, now: float) -> None:
        """What is here is in L1; the leg takes it from there, if it is still there by then."""
        self._close(load)
        if load.asked_at is not None and load.in_time:
            seconds = now - load.asked_at
            self._worth.loaded(load.num_loaded, seconds, undisturbed=load.undisturbed)
        self._known.mark(load.names[: load.num_loaded], now)
        load.sequence.num_loaded_tokens = load.num_loaded * self._link.spec.block_size
        self._batcher.admit(load.sequence)

    def _close(self, load: _Load) -> None:
        load.is_over = True
        del self._loads[load.sequence]
        for name in load.names:
            if self._by_name.get(name) is load:
                del self._by_name[name]

    # --- blocks ---

    def _copy(self, budget: int) -> int:
        copied = 0
        while self._landed:
            lookup = self._landed[0]
            load = lookup.load
            usable = min(lookup.num_here, load.num_found - lookup.start)
            while lookup.num_copied < usable and not load.is_over:
                if copied == budget:
                    return copied
                if not self._install(lookup):
                    load.num_found = lookup.next_block
                    break
                copied += 1
                lookup.num_copied += 1
            self._landed.popleft()
            load.landing -= 1
            self._link.lending.release(lookup.loan.slots)
        return copied

    def _install(self, lookup: _Lookup) -> bool:
        """Make the next block findable in L1. False = there is no room for it beside running legs
        and the prefix before it.
        """
        pool = self._batcher.pool
        index = lookup.next_block
        name = lookup.load.names[index]
        if pool.lookup([name]):  # computed meanwhile
            return True
        if pool.num_available <= len(self._batcher.running) + lookup.load.num_before + index:
            return False
        (block,) = pool.allocate(1)
        self._link.copy_back(lookup.loan.slots[lookup.num_copied], block)
        pool.name(block, name, lookup.load.sequence.salt)
        pool.release([block])
        lookup.load.num_loaded += 1
        return True
