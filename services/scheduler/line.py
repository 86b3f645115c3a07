"""Legs that wait for a worker, and the moment at which each gets one. Pure."""

from collections.abc import Callable

from msgspec.structs import replace

from services.scheduler.config import SchedulerConfig
from services.scheduler.entries import Entry
from services.scheduler.fairness import FairQueue
from services.scheduler.placement import choose_detokenizer, choose_worker
from services.scheduler.workers import Key, Peer, Peers

Run = Callable[[Entry, Peer, Peer, float], None]
"""Called with a leg, its worker, its detokenizer and the time; sets the leg's `worker`."""


class Line:
    """The queue, and apart from it the legs that must hold up nobody else: those that must run
    alone, and those that only a worker that is away can hold.
    """

    def __init__(self, peers: Peers, config: SchedulerConfig, run: Run) -> None:
        self._peers = peers
        self._config = config
        self._run = run
        self._queue = FairQueue[Entry](config.aging_s, config.tenant_weights)
        self._apart: dict[Key, Entry] = {}

    def __len__(self) -> int:
        return len(self._queue) + len(self._apart)

    def add(self, entry: Entry, preferred: str, now: float) -> None:
        """Place `entry` at `preferred` at once if that can be, else let it wait."""
        if entry.submit.alone:
            self._apart[entry.key] = entry
        elif not self._run_again(entry, preferred, now):
            self._queue.add(entry)

    def remove(self, entry: Entry) -> None:
        """A waiting leg leaves; a placed one is not here."""
        if entry.worker:
            return
        if self._apart.get(entry.key) is entry:
            del self._apart[entry.key]
        else:
            self._queue.remove(entry)

    def place(self, now: float) -> None:
        """Place legs in their order while somebody has room."""
        if not len(self):
            return
        steps = self._config.prefill_steps
        first = self._queue.first(now)
        if first is None or not first.redrive or self._spare():
            self._place_apart(now)
        workers = list(self._peers.workers.values())
        kept_free, spare = self._kept_free(), self._spare()
        for _ in range(self._config.runs_per_turn):
            first = self._queue.first(now)
            detokenizer = choose_detokenizer(self._peers.detokenizers.values())
            if first is None or detokenizer is None:
                return
            free = [w for w in workers if w is not kept_free or (first.redrive and not spare)]
            worker = choose_worker(free, first.need, steps)
            if worker is not None:
                self._queue.charge(first)
                self._run(first, worker, detokenizer, now)
            elif self._too_long(first):
                self._queue.remove(first)
                self._apart[first.key] = first
            else:
                return

    def _place_apart(self, now: float) -> None:
        """Suspects in the order of their innocence: who got most ids before has run longest."""
        steps = self._config.prefill_steps
        for entry in sorted(self._apart.values(), key=lambda e: -len(e.submit.output_ids)):
            alone, kept_free = entry.submit.alone, self._kept_free()
            workers = [kept_free] if alone and kept_free else self._peers.workers.values()
            worker = choose_worker(workers, entry.need, steps, alone=alone)
            detokenizer = choose_detokenizer(self._peers.detokenizers.values())
            if worker is None or detokenizer is None:
                continue
            del self._apart[entry.key]
            if alone:
                worker.isolate(entry.key, now)
                if worker.num_legs:  # those that were on trial before: it waits for none of them
                    entry.submit = replace(entry.submit, alone=False)
            self._run(entry, worker, detokenizer, now)

    def _too_long(self, entry: Entry) -> bool:
        """Whether no worker that is here could ever hold the leg."""
        here = [worker.beat for worker in self._peers.workers.values() if worker.beat.ready]
        return bool(here) and entry.need.tokens_max > max(beat.max_model_len for beat in here)

    def _kept_free(self) -> Peer | None:
        """The worker that takes no new legs until it is empty, for suspects: one after the other,
        legs whose workers died. Re-drives it does take until then, and while it is the only one:
        their clients are in mid-sentence.
        """
        ready = [worker for worker in self._peers.workers.values() if worker.placeable]
        if not ready or not any(entry.submit.alone for entry in self._apart.values()):
            return None
        return min(ready, key=lambda w: (not w.quarantine, w.num_legs, w.instance))

    def _spare(self) -> bool:
        """Whether suspects have a worker to themselves, and the others another one."""
        kept = self._kept_free()
        others = [w for w in self._peers.workers.values() if w.placeable and w is not kept]
        return kept is not None and bool(others) and (kept.quarantine or not kept.num_legs)

    def _run_again(self, entry: Entry, preferred: str, now: float) -> bool:
        """Back to its last worker, past the queue and without credit: it may still be running
        there, or its blocks may still be cached.
        """
        worker = self._peers.workers.get(preferred)
        detokenizer = choose_detokenizer(self._peers.detokenizers.values())
        if worker is None or detokenizer is None or not worker.placeable:
            return False
        if worker.alone not in (None, entry.key) or preferred == entry.need.avoid:
            return False
        self._run(entry, worker, detokenizer, now)
        return True
