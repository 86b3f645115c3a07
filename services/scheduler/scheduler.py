"""Takes legs, puts them in order, gives each a worker and a detokenizer. Pure.

Everything here is soft: a scheduler that loses it answers `unknown`, and the sessions drive their
legs again. So it never persists, never recovers, and never moves a leg by itself.
"""

from collections import Counter

from services.scheduler.config import SchedulerConfig
from services.scheduler.entries import Entries, Entry, is_redrive, named
from services.scheduler.leadership import Leadership
from services.scheduler.line import Line
from services.scheduler.placement import need_of
from services.scheduler.rate import Rate
from services.scheduler.refusal import refusal_of
from services.scheduler.workers import Gone, Key, Peer, Peers, Sent
from shared.core import Outbox
from shared.errors import MeshError, Unavailable
from shared.liveness import Watcher
from shared.messages import (
    Accepted,
    AskBlocks,
    Beacon,
    Beat,
    BlocksChanged,
    Cancel,
    Died,
    Ended,
    Failed,
    Lost,
    Message,
    NotLeader,
    Renew,
    Renewed,
    RenewedLeg,
    RenewLeg,
    RouteLost,
    Run,
    Submit,
    ToScheduler,
)
from shared.subjects import beacon, everyone, inbox

GRACE_S = 1.0  # a new leader says `unknown` to nobody for so long: legs are on their way to it


class SchedulerCore:
    """`SchedulerCore(instance, pool, SchedulerConfig(), now)`: one scheduler, leading or standby.

    The owner passes every `ToScheduler` message to `receive` (beats of all roles, its own included,
    beacons of the pool, `Died`), calls `tick` every 50 ms, says when its connection goes and comes,
    and publishes `outbox`.
    """

    def __init__(self, instance: str, pool: str, config: SchedulerConfig, now: float) -> None:
        self.instance = instance
        self.outbox = Outbox()
        self.counters: Counter[str] = Counter()
        self.entries = Entries(config.tombstones_max, config.tombstone_s)
        self.peers = Peers(config.known_blocks_max)
        self._pool = pool
        self._config = config
        self._leadership = Leadership(instance, now)
        self._watcher = Watcher()
        self._line = Line(self.peers, config, self._run)
        self._office_at = now
        self._worker_at = now  # when a worker was last ready
        self._roomiest = Beat(instance="", role="gpu_worker", seq=0)  # worker of the last ready
        self._placed = Rate(now)

    # --- views ---

    @property
    def is_leader(self) -> bool:
        return self._leadership.leading

    @property
    def term(self) -> int:
        """The highest term heard; our beats echo it."""
        return self._leadership.highest

    @property
    def num_queued(self) -> int:
        return len(self._line)

    @property
    def num_workers(self) -> int:
        """Workers that take legs."""
        return sum(worker.placeable for worker in self.peers.workers.values())

    # --- messages ---

    def receive(self, message: ToScheduler, now: float) -> None:
        """Take one message."""
        if self._watcher.heard(now):
            self.counters["hearing_began"] += 1
            self.slept(now)
        match message:
            case Submit():
                self._submit(message, now)
            case Beat():
                self._leadership.echo(message.term)
                self.peers.hear(message, now)
                if message.role in ("gpu_worker", "detokenizer"):
                    self._place_waiting(now)
            case Ended():
                for leg in message.legs:
                    self._leave((leg.request_id, leg.choice), leg.epoch, now)
                self._place_waiting(now)
            case Renew():
                self._renew(message, now)
            case Cancel():
                self._cancel(message, now)
            case Beacon():
                self._beacon(message, now)
            case Died():
                self._died(message, now)
            case BlocksChanged():
                self.counters["blocks_unknown"] += not self.peers.blocks_changed(message, now)

    def tick(self, now: float) -> None:
        """Judge what time has made true: our own sleep first."""
        if self._watcher.slept(now):
            self.slept(now)
        if not self._watcher.connected or not self._watcher.hears(now):
            return  # a deaf leader does not show itself either: a standby that hears should lead
        for gone in self.peers.tick(now):
            self._tell_gone(gone, now)
        for worker in self.peers.to_ask(now):
            self.outbox.put(inbox(worker), AskBlocks(scheduler=self.instance))
        if self._leadership.tick(now):
            self._take_office(now)
        if self.num_workers:
            self._worker_at = now
        self._expire(now)
        self._place_waiting(now)
        self._placed.tick(now)
        if self._leadership.beacon_due(now):
            self._show()

    def connection_lost(self, now: float) -> None:
        """Judge nobody until we hear again."""
        self._watcher.connected = False
        self.slept(now)

    def reconnected(self, now: float) -> None:
        self._watcher.connected = True
        self.slept(now)

    def resign(self, now: float) -> None:
        """Begin to drain: lead no more. What waits here will be submitted to the next leader."""
        if self._leadership.resign():
            self._show(resigning=True)
            self._step_down(now)

    def slept(self, now: float) -> None:
        """The silence was our own: every clock starts anew."""
        self.counters["clock_restarts"] += 1
        self._leadership.restart(now)
        self.peers.restart(now)
        self._worker_at = now
        for entry in self.entries.all():
            entry.lease_until = now + self._config.lease_s

    # --- taking legs ---

    def _submit(self, submit: Submit, now: float) -> None:
        if not self.is_leader:
            self._answer(
                submit,
                NotLeader(
                    **named(submit),
                    scheduler=self.instance,
                    term=self._leadership.highest,
                    leader=self._leadership.leader,
                ),
            )
            return
        key = (submit.request_id, submit.choice)
        known = self.entries.get(key)
        if self.entries.is_over(key, submit.epoch) or (known and submit.epoch < known.epoch):
            self.counters["submit_stale"] += 1
            return
        if known is not None and submit.epoch == known.epoch:
            self._accept(submit)  # a duplicate on the bus
            return
        refusal = self._refusal(submit, now) if known is None else None
        if refusal is not None:
            self._fail(submit, refusal, now)
            return
        self._take(submit, known, now)
        self._accept(submit)
        self._place_waiting(now)

    def _take(self, submit: Submit, known: Entry | None, now: float) -> None:
        """Queue a leg; a higher epoch takes over the place and arrival of a queued one."""
        preferred, arrived = submit.last_worker, now
        if known is not None:
            self._line.remove(known)
            preferred = preferred or known.worker
            arrived = now if known.worker else known.arrived
        need = need_of(submit)
        entry = Entry(
            submit=submit,
            need=need,
            lease_until=now + self._config.lease_s,
            priority=submit.priority,
            tenant=submit.tenant,
            tokens=need.tokens,
            deadline=now + submit.deadline_ms / 1000 if submit.deadline_ms else float("inf"),
            arrived=arrived,
            redrive=is_redrive(submit),
        )
        self.entries.put(entry)
        self._line.add(entry, preferred, now)

    def _refusal(self, submit: Submit, now: float) -> MeshError | None:
        """Why a leg that is new here is not taken. A re-drive is never shed."""
        if is_redrive(submit):
            return None
        refusal = refusal_of(
            need_of(submit),
            self.peers,
            self.num_queued,
            self._config.queued_legs_max,
            self._placed.per_s,
        )
        if refusal is None and now - self._worker_at > self._config.no_worker_s:
            return Unavailable("no worker is up.", retry_after_s=5.0)
        return refusal

    def _accept(self, submit: Submit) -> None:
        accepted = Accepted(**named(submit), scheduler=self.instance, term=self._leadership.term)
        self._answer(submit, accepted)

    def _fail(self, submit: Submit, error: MeshError, now: float) -> None:
        self.counters[f"refused_{error.code}"] += 1
        self.entries.bury((submit.request_id, submit.choice), submit.epoch, now)
        failed = Failed(
            **named(submit),
            code=error.code,
            detail=error.detail,
            param=error.param,
            retry_after_s=error.retry_after_s,
        )
        self._answer(submit, failed)

    def _place_waiting(self, now: float) -> None:
        if self.is_leader:
            self._line.place(now)

    def _run(self, entry: Entry, worker: Peer, detokenizer: Peer, now: float) -> None:
        entry.worker, entry.detokenizer = worker.instance, detokenizer.instance
        entry.lease_until = now + self._config.lease_s
        need = entry.need
        missing = need.prefill_tokens - need.cached_tokens(worker)
        worker.send(Sent(entry.key, now, missing, need.blocks(worker.beat)))
        detokenizer.send(Sent(entry.key, now, 0, 0))
        self._placed.count()
        run = Run(
            submit=entry.submit,
            scheduler=self.instance,
            term=self._leadership.term,
            detokenizer=detokenizer.instance,
        )
        self.outbox.put(inbox(worker.instance), run)

    # --- legs that leave ---

    def _leave(self, key: Key, epoch: int, now: float) -> None:
        """All epochs of a leg up to `epoch` are over."""
        self.entries.bury(key, epoch, now)
        entry = self.entries.get(key)
        if entry is None or entry.epoch > epoch:
            return
        self._drop(entry, now)
        for peer in self.peers.named(entry.worker, entry.detokenizer):
            peer.end(key)

    def _cancel(self, cancel: Cancel, now: float) -> None:
        """The session may not know the worker yet: pass it on."""
        key = (cancel.request_id, cancel.choice)
        entry = self.entries.get(key)
        if entry is not None and entry.worker and entry.epoch <= cancel.epoch:
            self.outbox.put(inbox(entry.worker), cancel)
        self._leave(key, cancel.epoch, now)

    def _drop(self, entry: Entry, now: float) -> None:
        self._line.remove(entry)
        self.entries.remove(entry, now)

    def _expire(self, now: float) -> None:
        """Forget legs that nobody renews; refuse new ones when no worker has come for long."""
        self.entries.expire(now)
        nobody = now - self._worker_at > self._config.no_worker_s
        for entry in self.entries.all():
            if now > entry.lease_until:
                self.counters["lapsed"] += not entry.worker  # a placed one is its worker's to keep
                self._drop(entry, now)
            elif nobody and not entry.worker and not entry.redrive:
                self._drop(entry, now)
                self._fail(entry.submit, Unavailable("no worker is up.", retry_after_s=5.0), now)

    # --- renewals ---

    def _renew(self, renew: Renew, now: float) -> None:
        answers = [
            answer
            for question in renew.legs
            if (answer := self._renewed(question, now)) is not None
        ]
        if answers:
            renewed = Renewed(holder=self.instance, legs=answers)
            self.outbox.put(inbox(renew.gateway), renewed)

    def _renewed(self, question: RenewLeg, now: float) -> RenewedLeg | None:
        leg = (question.request_id, question.choice, question.epoch)
        entry = self.entries.get(leg[:2])
        if entry is None or entry.epoch < question.epoch:
            if self.is_leader and now - self._office_at < GRACE_S:
                return None
            return RenewedLeg(*leg, "unknown")
        if entry.epoch > question.epoch:
            return None
        entry.lease_until = now + self._config.lease_s
        if not entry.worker:
            return RenewedLeg(*leg, "queued")
        return RenewedLeg(*leg, "placed", worker=entry.worker, detokenizer=entry.detokenizer)

    # --- office ---

    def _take_office(self, now: float) -> None:
        """Lead. What was lost lately is said again: the last leader may have died saying it."""
        self.counters["took_office"] += 1
        self._office_at = now
        for gone in self.peers.recent(now):
            self._tell_gone(gone, now)

    def _beacon(self, message: Beacon, now: float) -> None:
        """Step down for a higher claim: what waits here will be submitted there."""
        if message.pool != self._pool:
            return
        if self._leadership.beacon(message.term, message.scheduler, now):
            self._step_down(now)
        if message.resigning:
            self._leadership.vacate(message.scheduler)

    def _step_down(self, now: float) -> None:
        self.counters["stepped_down"] += 1
        for entry in self.entries.all():
            self._drop(entry, now)

    def _died(self, died: Died, now: float) -> None:
        self._leadership.vacate(died.instance)
        gone = self.peers.died(died.instance, now)
        if gone is not None:
            self._tell_gone(gone, now)

    def _tell_gone(self, gone: Gone, now: float) -> None:
        """Tell every gateway, and the session of each leg known to be placed there."""
        if not self.is_leader:
            return
        self.counters["lost_hung" if gone.hung else "lost_dead"] += 1
        lost = Lost(
            instance=gone.instance,
            scheduler=self.instance,
            term=self._leadership.term,
            hung=gone.hung,
        )
        self.outbox.put(everyone("gateway"), lost)
        for entry in self.entries.all():
            if gone.instance not in (entry.worker, entry.detokenizer):
                continue
            reason = "worker_hung" if gone.hung else "worker_lost"
            if gone.instance != entry.worker:
                reason = "detokenizer_lost"
            route_lost = RouteLost(**named(entry.submit), reason=reason, term=self._leadership.term)
            self._answer(entry.submit, route_lost)
            self._drop(entry, now)

    def _show(self, *, resigning: bool = False) -> None:
        ready = [worker.beat for worker in self.peers.workers.values() if worker.placeable]
        if ready:
            self._roomiest = max(ready, key=lambda beat: beat.max_model_len)
        shown = Beacon(
            scheduler=self.instance,
            term=self._leadership.term,
            pool=self._pool,
            model=self._roomiest.model,
            workers=len(ready),
            max_model_len=self._roomiest.max_model_len,
            queued=self.num_queued,
            resigning=resigning,
            kv_policy=self._roomiest.kv_policy,
        )
        self.outbox.put(beacon(self._pool), shown)

    def _answer(self, submit: Submit, message: Message) -> None:
        self.outbox.put(inbox(submit.gateway), message)
