"""The way from an engine to L2: which kv_tier it asks, the slots it lends, what it copies."""

import time
from collections import Counter

from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.l2.lending import Borrower, Lending
from services.gpu_worker.runner import ModelRunner
from shared.breaker import Breaker, Limits, Permit
from shared.core import Outbox
from shared.kv import BlockHash
from shared.liveness import SILENCE_S
from shared.messages import Beat, Message
from shared.slots import host
from shared.subjects import inbox

SLOTS_MIN, SLOTS_MAX = 8, 1024
_TIERS_MAX = 8  # of this host; one is usual
_LIMITS = Limits(failures=2, window_s=5.0)  # each failure has cost a leg `l2_answer_s`


class Tier:
    """A kv_tier of this host."""

    def __init__(self, borrower: Borrower) -> None:
        self.borrower = borrower
        self.breaker = Breaker(_LIMITS)
        self.heard_at = 0.0

    def is_up(self, now: float) -> bool:
        return now - self.heard_at < SILENCE_S and not self.borrower.is_gone


class Link:
    """Uses the newest kv_tier of this host that takes work. Memory is made when the first one is
    heard: a mesh without L2 pays nothing.
    """

    def __init__(
        self,
        worker: str,
        runner: ModelRunner,
        config: WorkerConfig,
        outbox: Outbox,
        counters: Counter[str],
    ) -> None:
        self.worker = worker
        self.spec = runner.spec
        self.config = config
        self.counters = counters
        self.copy_s = 0.0
        self.num_copied = 0  # blocks
        self._runner = runner
        self._outbox = outbox
        self._host = host()
        self._tiers: dict[str, Tier] = {}  # oldest first
        self._lending: Lending | None = None

    @property
    def is_open(self) -> bool:
        """Whether a kv_tier was ever heard."""
        return self._lending is not None

    @property
    def lending(self) -> Lending:
        assert self._lending is not None, "a tier was heard"
        return self._lending

    def heard(self, beat: Beat, now: float) -> None:
        """A kv_tier, of whatever host, shows itself."""
        if not (self.config.l2 and self.spec.block_bytes):
            return
        if beat.host != self._host or beat.draining or not beat.ready:
            self._tiers.pop(beat.instance, None)
            return
        tier = self._tiers.get(beat.instance)
        if tier is None:
            try:
                tier = Tier(Borrower(beat.instance, beat.pid))
            except (OSError, OverflowError):  # it has just ended, or never was
                return
            for instance in [name for name, old in self._tiers.items() if old.borrower.is_gone]:
                del self._tiers[instance]
            self._tiers[beat.instance] = tier
            if len(self._tiers) > _TIERS_MAX:
                del self._tiers[next(iter(self._tiers))]
            self._lending = self._lending or self._new_lending()
        tier.heard_at = now

    def deaf(self) -> None:
        """Nobody can be asked until they are heard again."""
        for tier in self._tiers.values():
            tier.heard_at = float("-inf")

    def tier(self, now: float) -> Tier | None:
        """The one to ask."""
        for tier in reversed(self._tiers.values()):
            if tier.is_up(now):
                return tier
        return None

    def enter(self, now: float) -> tuple[Tier, Permit] | None:
        """Leave to ask it."""
        tier = self.tier(now)
        permit = None if tier is None else tier.breaker.enter(now)
        return None if tier is None or permit is None else (tier, permit)

    def send(self, borrower: Borrower, message: Message) -> None:
        self._outbox.put(inbox(borrower.instance), message)

    def collect(self, now: float) -> None:
        """See `Lending.collect`."""
        self.lending.collect(now, self._outbox)

    def copy_out(self, block: int, slot: int) -> None:
        started = time.perf_counter()
        self._runner.read_block(block, self.lending.payload(slot))
        self._copied(started)

    def copy_back(self, slot: int, block: int) -> None:
        started = time.perf_counter()
        self._runner.write_block(block, self.lending.payload(slot))
        self._copied(started)

    def close(self) -> None:
        """Give the memory back; only where nothing is lent."""
        if self._lending is not None:
            self._lending.close()

    def _copied(self, started: float) -> None:
        self.copy_s += time.perf_counter() - started
        self.num_copied += 1

    def _new_lending(self) -> Lending:
        size = self.spec.block_bytes
        num_slots = max(SLOTS_MIN, min(SLOTS_MAX, self.config.l2_slots_bytes // size))
        return Lending(num_slots, size, self.worker)


class Known:
    """Blocks of which L2 said lately that it has them. What it forgets is written once more."""

    def __init__(self, keep_s: float, entries_max: int) -> None:
        self._keep_s = keep_s
        self._entries_max = entries_max
        self._at: dict[BlockHash, float] = {}  # oldest first

    def mark(self, names: list[BlockHash], now: float) -> None:
        for name in names:
            self._at.pop(name, None)
            self._at[name] = now
        while len(self._at) > self._entries_max:
            del self._at[next(iter(self._at))]

    def forget(self) -> None:
        """Who said so has lost some of them."""
        self._at.clear()

    def has(self, name: BlockHash, now: float) -> bool:
        return now - self._at.get(name, float("-inf")) < self._keep_s
