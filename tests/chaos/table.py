"""Which fault meets which target, how often, and what it may do to requests under way.

Anything but a right answer is a violation, except what a row allows and says why.
"""

import signal
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from tests.chaos.checker import Allowed
from tests.chaos.nats_proxy import Verb
from tests.chaos.nemesis import Both, Fault, Kill, Pause
from tests.chaos.nemesis_cache import Needed, Spoil, evict_half, flip, swap
from tests.chaos.nemesis_clients import Leave, Poison, Stall
from tests.chaos.nemesis_net import Bad, Flush, Full, Messages, Reset
from tests.chaos.nemesis_stored import Lethal, StoreFull

MAIN_ROUNDS = 10  # of 16 streams: 160 waits
REAL_ROUNDS = 3
L2_HITS = "engine_l2_hit_tokens"  # counters: what came from L2,
L2_DROPPED = "engine_l2_dropped_blocks"  # what was not written,
REJECTED = "rejected"  # what was read and not believed, by reason,
MISSED = "missed_blocks"  # what is not there,
REFUSED = "refused_blocks"  # what Redis did not take,
FAILURES = "failures"  # and what Redis did not do
GATEWAY_GONE = Allowed(cut=True, codes=frozenset({"unavailable", "not_found"}))
"""A plain stream ends with the connection to its gateway; on the bus, silence says so, or another
gateway that does not know it. A stored one does not end.
"""

TYPED = Allowed(
    # The last is what a response that failed has for a code, whatever was wrong with the mesh.
    codes=frozenset({"unavailable", "internal_error", "overloaded", "server_error"}),
    later=True,
    stored=True,
)
"""More than one process is gone: an error is allowed if it says so, to those who ask then, too.
Silence and wrong text never are."""


class Experiment(NamedTuple):
    """One row."""

    fault: str
    target: str
    make: Callable[[], Fault]
    hold_s: float = 0.0  # before it is healed
    rounds: int = 2
    allowed: Allowed = Allowed()
    gap_p99_s: float | None = None  # the promise, where one is made
    lookups: bool = False  # kv_tier lives and is asked all the time
    still: bool = False  # no stream that runs is moved
    cold: bool = False  # the load is conversations of which no L1 holds anything before

    @property
    def name(self) -> str:
        return f"{self.fault} {self.target}"


def kills() -> list[Experiment]:
    main = MAIN_ROUNDS
    return [
        Experiment("kill", "gpu_worker", lambda: Kill("gpu_worker"), 0, main, gap_p99_s=0.5),
        Experiment("kill", "gpu_worker.io", lambda: Kill("gpu_worker.io"), 0, main, gap_p99_s=0.5),
        Experiment("kill", "gpu_worker.engine", lambda: Kill("gpu_worker.engine"), 0, main,
                   gap_p99_s=0.5),
        Experiment("kill", "detokenizer", lambda: Kill("detokenizer"), 0, main, gap_p99_s=0.5),
        Experiment("kill", "scheduler.leader", lambda: Kill("scheduler.leader"), 0, main,
                   gap_p99_s=0.5, still=True),
        Experiment("kill", "nats", lambda: Kill("nats"), 0, main, gap_p99_s=3.0),
        Experiment("kill", "scheduler.standby", lambda: Kill("scheduler.standby"), gap_p99_s=0.5),
        Experiment("kill", "tokenizer", lambda: Kill("tokenizer"), gap_p99_s=0.5),
        Experiment("kill", "kv_tier", lambda: Kill("kv_tier"), gap_p99_s=0.5),
        Experiment("kill", "redis", lambda: Kill("redis"), gap_p99_s=0.5, lookups=True),
        Experiment("kill", "gateway", lambda: Kill("gateway"), allowed=GATEWAY_GONE),
        *(
            Experiment("kill all", role, partial(Kill, role, everyone=True), allowed=TYPED)
            for role in ("gpu_worker", "detokenizer", "scheduler", "tokenizer")
        ),
    ]  # fmt: skip


def pauses() -> list[Experiment]:
    main, hold = MAIN_ROUNDS, 4.0
    return [
        Experiment("pause", "gpu_worker", lambda: Pause("gpu_worker"), hold, main, gap_p99_s=1.5),
        Experiment("pause", "gpu_worker.io", lambda: Pause("gpu_worker.io"), hold, gap_p99_s=1.5),
        Experiment("pause", "gpu_worker.engine", lambda: Pause("gpu_worker.engine"), hold),
        Experiment("pause", "detokenizer", lambda: Pause("detokenizer"), hold, gap_p99_s=1.5),
        Experiment("pause", "scheduler.leader", lambda: Pause("scheduler.leader"), 5.0,
                   gap_p99_s=0.5, still=True),
        Experiment("pause", "scheduler.standby", lambda: Pause("scheduler.standby"), hold,
                   gap_p99_s=0.5),
        Experiment("pause", "tokenizer", lambda: Pause("tokenizer"), hold, gap_p99_s=0.5),
        Experiment("pause", "kv_tier", lambda: Pause("kv_tier"), hold, gap_p99_s=0.5),
        Experiment("pause", "redis", lambda: Pause("redis"), hold, gap_p99_s=0.5, lookups=True),
        Experiment("pause", "gateway", lambda: Pause("gateway"), hold),
        # Longer than a gateway may be silent before another adopts what it ran.
        Experiment("pause 8 s", "gateway", lambda: Pause("gateway"), 8.0),
        Experiment("pause", "nats", lambda: Pause("nats"), 2.0, still=True),
        Experiment("pause all", "gpu_worker", lambda: Pause("gpu_worker", everyone=True), 3.0),
    ]  # fmt: skip


def restarts() -> list[Experiment]:
    """SIGTERM: each drains, as in a rolling restart."""
    roles = ("gateway", "tokenizer", "gpu_worker", "detokenizer", "kv_tier")
    return [
        Experiment(
            "restart", role, lambda role=role: Kill(role, number=signal.SIGTERM, within_s=20)
        )
        for role in (*roles, "scheduler.leader", "nats", "redis")
    ]


def network() -> list[Experiment]:
    both = ("sent", "received")
    rows = [
        Experiment("latency 50 ms", "nats", lambda: Bad("nats", latency_s=0.05), 3.0),
        Experiment("blackhole", "nats", lambda: Bad("nats", held=both), 2.0),
        Experiment("one way out", "nats", lambda: Bad("nats", held=("sent",)), 2.0),
        Experiment("one way in", "nats", lambda: Bad("nats", held=("received",)), 2.0),
        Experiment("reset", "nats", lambda: Reset("nats")),
        Experiment("cut mid-frame", "nats", lambda: Bad("nats", cuts=8), 2.0),
        Experiment("blackhole", "redis link", lambda: Bad("redis", held=both), 2.0, lookups=True),
        Experiment(
            "latency 50 ms", "redis link", lambda: Bad("redis", latency_s=0.05), 2.0, lookups=True
        ),
        Experiment("reset", "redis link", lambda: Reset("redis"), lookups=True),
        Experiment("full", "store", StoreFull, 4.0),
        Experiment("flush", "redis", Flush, lookups=True),
        Experiment("full", "redis", Full, 2.0, lookups=True),
    ]
    for role in ("gateway", "scheduler", "gpu_worker", "detokenizer", "tokenizer"):
        rows += [
            Experiment(
                "blackhole", f"{role} link", lambda r=role: Bad("nats", f"{r}-0", held=both), 3.0
            ),
            Experiment("reset", f"{role} link", lambda r=role: Reset("nats", f"{r}-0")),
        ]
    return rows


def messages() -> list[Experiment]:
    """On their way into one role's mailboxes, and heartbeats."""
    shares: dict[Verb, float] = {"drop": 0.1, "duplicate": 0.3, "delay": 0.1, "reorder": 0.3}
    # A second brings dozens of messages to some mailboxes and one or two to others.
    often = {"tokenizer": 3, "scheduler": 3, "gpu_worker": 3, "gateway": 0.5, "detokenizer": 0.5}
    roles = ("gateway", "tokenizer", "scheduler", "gpu_worker", "detokenizer", "beats")
    rows = [
        Experiment(verb, f"to {to}", partial(Messages, verb, to, share * often.get(to, 1)), 2.0)
        for verb, share in shares.items()
        for to in roles
    ]
    return [*rows, Experiment("drop", "beacons", partial(Messages, "drop", "beacons", 0.5), 3.0)]


def clients() -> list[Experiment]:
    return [
        Experiment("poison: crash", "engine", lambda: Poison("crash"), rounds=3),
        Experiment("poison: NaN", "engine", lambda: Poison("nan")),
        Experiment("poison: exception", "engine", lambda: Poison("raise")),
        Experiment("poison: out of memory", "engine", lambda: Poison("oom")),
        Experiment("poison: read", "tokenizer", lambda: Lethal("tokenizer"), rounds=3),
        Experiment("poison: read", "detokenizer", lambda: Lethal("detokenizer"), rounds=3),
        Experiment("leave", "8 clients", Leave),
        Experiment("stall", "a client", Stall),
    ]


def caches() -> list[Experiment]:
    """L2 in trouble, and a worker dies: its streams, conversations that share their beginnings, go
    on where L1 has nothing of them. A cache is a cache: nothing is allowed.
    """

    def row(fault: str, target: str, make: Callable[[], Fault], hold_s: float = 0.0) -> Experiment:
        return Experiment(fault, f"{target} + gpu_worker", make, hold_s, cold=True)

    shares: dict[Verb, float] = {"drop": 0.3, "duplicate": 0.5, "delay": 0.3, "reorder": 0.5}
    return [
        Experiment("kill", "gpu_worker, its blocks in L2",
                   lambda: Needed(None, "gpu_worker", L2_HITS), cold=True),
        row("flip bits", "blocks", lambda: Needed(Spoil(flip), "kv_tier", REJECTED)),
        row("swap", "blocks", lambda: Needed(Spoil(swap), "kv_tier", REJECTED)),
        row("evict half", "blocks", lambda: Needed(Spoil(evict_half), "kv_tier", MISSED)),
        row("flush", "redis", lambda: Needed(Flush(), "kv_tier", MISSED)),
        row("full", "redis", lambda: Needed(Full(), "kv_tier", REFUSED), 2.0),
        row("kill", "redis", lambda: Needed(Kill("redis"), "kv_tier", FAILURES)),
        row("pause", "redis", lambda: Needed(Pause("redis"), "kv_tier", FAILURES), 3.0),
        row("kill", "kv_tier", lambda: Both(Kill("kv_tier"), Kill("gpu_worker"))),
        # It keeps the few slots that it was lent: there are none to lend.
        row("pause", "kv_tier", lambda: Needed(Pause("kv_tier"), "gpu_worker", L2_DROPPED), 4.0),
        *(
            row(verb, "to kv_tier",
                lambda v=verb, s=share: Both(Messages(v, "kv_tier", s), Kill("gpu_worker")), 2.0)
            for verb, share in shares.items()
        ),
    ]  # fmt: skip


def pairs() -> list[Experiment]:
    """Two faults at once."""
    two = "gpu_worker + "
    return [
        Experiment("kill", two + "scheduler.leader",
                   lambda: Both(Kill("gpu_worker"), Kill("scheduler.leader")), allowed=TYPED),
        Experiment("kill", two + "gpu_worker, in its re-drive",
                   lambda: Both(Kill("gpu_worker"), Kill("gpu_worker"), 0.03), allowed=TYPED),
        Experiment("pause + kill", two + "nats",
                   lambda: Both(Pause("gpu_worker"), Kill("nats"), 0.2), 4.0, allowed=TYPED),
    ]  # fmt: skip


def main_rows() -> list[Experiment]:
    """What is also done to the real model, where a round takes several times as long."""
    nats = next(row for row in restarts() if row.target == "nats")
    rows = [*kills(), *pauses(), nats, *caches()[:4]]
    return [row._replace(rounds=min(row.rounds, REAL_ROUNDS)) for row in rows]


def table() -> list[Experiment]:
    """Every row."""
    return [
        *(*kills(), *pauses(), *restarts(), *network(), *messages()),
        *(*clients(), *caches(), *pairs()),
    ]
