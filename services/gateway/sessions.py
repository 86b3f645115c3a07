"""All sessions of one gateway: who is asked what, and who is driven again. Pure.

Every fault downstream ends in `_redrive`: a lost message, a dead process, a reconnect, a hang.
"""

import random
from collections import Counter

from msgspec import Struct

from services.gateway.clocks import Deadlines, Renewals
from services.gateway.events import Emit, Resume, SessionSpec
from services.gateway.peers import Leader
from services.gateway.redrives import Redrives
from services.gateway.session import ROUTE_LOST, Cause, Leg, Session, cause_of
from services.gateway.tokenizing import Tokenizing
from shared.core import Outbox
from shared.errors import ERRORS, Cancelled, DeadlineExceeded, MeshError, Overloaded
from shared.liveness import Watcher
from shared.messages import (
    Accepted,
    Beacon,
    Beat,
    Detokenized,
    Died,
    Failed,
    Lost,
    NotLeader,
    Renewed,
    RouteLost,
    Started,
    TextDelta,
    TextRecord,
    ToGateway,
    Tokenized,
)
from shared.subjects import inbox


class Limits(Struct, frozen=True, kw_only=True):
    """Bounds of one gateway."""

    sessions: int = 4096
    legs: int = 16384  # of all sessions together
    redrives_per_s: float = 1000.0


class SessionTable:
    """`SessionTable(gateway, pool, rng)`; `rng` draws seeds and jitter.

    The owner opens and cancels sessions, passes every `ToGateway` message to `receive`, calls
    `tick` every 50 ms, says when its own connection goes and comes, and publishes `outbox`.
    """

    def __init__(
        self, gateway: str, pool: str, rng: random.Random, limits: Limits | None = None
    ) -> None:
        self.outbox = Outbox()
        self.counters: Counter[str] = Counter()  # end_<code>, dropped_<why>
        self._gateway = gateway
        self._pool = pool
        self._rng = rng
        self._limits = limits or Limits()
        self.leading = Leader()
        self._watcher = Watcher()
        self._redrives = Redrives(
            gateway, self.leading, self.outbox, rng, self._limits.redrives_per_s
        )
        self._renewals = Renewals(gateway, self.outbox, rng)
        self._tokenizing = Tokenizing(gateway, self.outbox)
        self._sessions: dict[str, Session] = {}
        self._num_legs = 0
        self._deadlines = Deadlines()
        self._waiting: dict[str, Session] = {}  # tokenized, but the model's context is not known

    @property
    def tokenizers(self) -> int:
        """Live tokenizers."""
        return len(self._tokenizing.tokenizers)

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def redrives(self) -> Counter[str]:
        """Submits that were planned again, by cause."""
        return self._redrives.counters

    @property
    def num_legs(self) -> int:
        return self._num_legs

    @property
    def num_open(self) -> int:
        """Questions to tokenizers and Submits that nobody has answered yet."""
        return len(self._tokenizing) + len(self._redrives) + len(self._waiting)

    def session(self, request_id: str) -> Session | None:
        return self._sessions.get(request_id)

    def choose_tokenizer(self) -> str:
        """A live tokenizer for `Detokenize` and plain `/tokenize`; "" = none."""
        return self._tokenizing.tokenizers.choose([])

    # --- the owner's commands ---

    def open(self, spec: SessionSpec, emit: Emit, now: float, resume: Resume | None = None) -> None:
        """Begin a session, or go on with one. `SessionEnd` is the last event, also when refused."""
        assert spec.request_id not in self._sessions
        session = Session(spec, emit, self._rng.getrandbits(64), now, resume)
        legs = session.num_prompts * spec.n
        full = len(self._sessions) >= self._limits.sessions
        if full or self._num_legs + legs > self._limits.legs:
            self.counters["end_overloaded"] += 1
            session.end(Overloaded("too many requests are open here.", retry_after_s=1.0))
            return
        self._sessions[spec.request_id] = session
        self._num_legs += legs
        self._deadlines.add(spec.request_id, session.deadline)
        if session.opened:
            self._open_legs(session, now)
            return
        self._tokenizing.begin(session, now)
        if self._watcher.connected:
            self._tokenizing.ask(spec.request_id, now)

    def cancel(self, request_id: str, reason: str, now: float) -> None:  # noqa: ARG002 - one shape
        """End a session for its client's sake; unknown or ended ones are left alone."""
        session = self._sessions.get(request_id)
        if session is not None:
            self._end(session, Cancelled(f"the request was cancelled: {reason}."))

    def connection_lost(self, now: float) -> None:  # noqa: ARG002 - one shape
        """Our own connection is down: judge nobody, re-send nothing."""
        self._watcher.connected = False

    def reconnected(self, now: float) -> None:
        """Messages both ways may be lost: ask soon, but count no silence before now."""
        self._watcher.connected = True
        self.slept(now)
        self._renewals.reconnected(now)

    # --- messages ---

    def receive(self, message: ToGateway, now: float) -> None:
        """Take one message; strangers, duplicates and lower epochs are dropped."""
        self._tokenizing.heard_at = now
        if self._watcher.heard(now):
            self._redrives.restart(now)
        match message:
            case TextDelta():
                for record in message.records:
                    self._on_text(record, now)
            case Tokenized():
                self._on_tokenized(message, now)
            case Accepted() | NotLeader() | Started() | RouteLost():
                self._on_leg(message, now)
            case Failed():
                self._on_failed(message, now)
            case Renewed():
                self._on_renewed(message, now)
            case Beacon():
                self._on_beacon(message, now)
            case Beat():
                self._tokenizing.beat(message, now)
                self._renewals.beat(message)
            case Died() | Lost():
                self._on_gone(message, now)
            case Detokenized():
                self.counters["dropped_detokenized"] += 1  # the edge reads its own before us

    def tick(self, now: float) -> None:
        """Judge what time has made true: our own sleep first, deadlines even when cut off."""
        if self._watcher.slept(now):
            self.slept(now)
        for request_id in self._deadlines.overdue(self._sessions, len(self._sessions), now):
            session = self._sessions[request_id]
            self._end(session, DeadlineExceeded(f"no answer in {session.spec.timeout_s:g} s."))
        if not self._watcher.connected:
            return
        for request_id, error in self._tokenizing.tick(now):
            self._end(self._sessions[request_id], error)
        if self._watcher.hears(now):  # else a Submit is held up as well, not lost
            for session in self._redrives.send_due(now):
                self._end_if_finished(session)
        for session, leg in self._renewals.ask(self._sessions.values(), now):
            self._redrive(session, leg, "unanswered", now)

    # --- opening ---

    def _on_tokenized(self, message: Tokenized, now: float) -> None:
        session = self._tokenizing.answered(message)
        if session is None:
            return
        if self.leading.max_model_len == 0:
            self._waiting[session.spec.request_id] = session
        else:
            self._open_legs(session, now)

    def _open_legs(self, session: Session, now: float) -> None:
        try:
            session.open_legs(self.leading.max_model_len)
        except MeshError as error:
            self._end(session, error)
            return
        for leg in session.legs:
            if leg.state != "ended":
                self._redrives.submit(session, leg, now)
        self._end_if_finished(session)

    def _find(self, request_id: str, choice: int) -> tuple[Session, Leg] | None:
        session = self._sessions.get(request_id)
        if session is None or not 0 <= choice < len(session.legs):
            self.counters["dropped_stranger"] += 1
            return None
        return session, session.legs[choice]

    def _on_leg(self, message: Accepted | NotLeader | Started | RouteLost, now: float) -> None:
        found = self._find(message.request_id, message.choice)
        if found is None:
            return
        session, leg = found
        if message.epoch != leg.epoch or leg.state == "ended":
            self.counters["dropped_epoch"] += 1
            return
        match message:
            case Started():
                leg.placed(message.worker, message.detokenizer)
                session.started(leg, message.num_cached_tokens)
                self._redrives.accepted(leg)
                if leg.state != "pending":
                    leg.state = "running"
                self._cancel_elsewhere(session, leg)
            case Accepted():
                if message.term >= self.leading.term:
                    self._redrives.accepted(leg)
            case NotLeader():
                # Not taken. The re-send that is due anyway goes to whoever leads by then.
                self.counters["not_leader"] += 1
            case RouteLost():
                if message.term == 0 or message.term >= self.leading.term:
                    self._redrive(session, leg, ROUTE_LOST.get(message.reason, "moved"), now)

    def _cancel_elsewhere(self, session: Session, leg: Leg) -> None:
        """The leg runs on another worker now: free what an earlier epoch may still hold."""
        if leg.last_worker and leg.last_worker != leg.worker:
            cancel = session.cancel(leg, leg.last_epoch, "moved")
            self.outbox.put(inbox(leg.last_worker), cancel)
        leg.last_worker = ""

    def _on_text(self, record: TextRecord, now: float) -> None:
        found = self._find(record.request_id, record.choice)
        if found is None:
            return
        session, leg = found
        verdict = leg.take(record)
        if verdict == "drop":
            self.counters["dropped_text"] += 1
            return
        self._redrives.accepted(leg)
        if verdict == "gap":
            self._redrive(session, leg, "gap", now)
            return
        try:
            session.deliver(leg, record)
        except MeshError as error:
            self._end(session, error)
            return
        if leg.state == "ended":
            self._redrives.forget(leg)
            self._end_if_finished(session)

    def _on_failed(self, message: Failed, now: float) -> None:
        session = self._sessions.get(message.request_id)
        if session is None:
            return
        kind = ERRORS.get(message.code, MeshError)
        error = kind(message.detail, param=message.param, retry_after_s=message.retry_after_s)
        if message.choice < 0:
            if message.request_id not in self._tokenizing:
                self.counters["dropped_stranger"] += 1
            elif message.retryable:
                self._tokenizing.failed(message.request_id, message.epoch)
            else:
                self._end(session, error)
            return
        found = self._find(message.request_id, message.choice)
        if found is None or found[1].epoch != message.epoch or found[1].state == "ended":
            return
        if message.retryable:
            self._redrive(session, found[1], cause_of(message), now, error)
        else:
            self._end(session, error)

    def _on_renewed(self, message: Renewed, now: float) -> None:
        apart_s = self._renewals.apart_s(now)
        for answer in message.legs:
            found = self._find(answer.request_id, answer.choice)
            if found is None:
                continue
            session, leg = found
            if (
                answer.epoch == leg.epoch
                and leg.holder == message.holder
                and leg.state in ("accepted", "running")
            ):
                cause = leg.answered(answer, now, apart_s)
                if cause is not None:
                    self._redrive(session, leg, cause, now)

    def _on_gone(self, message: Died | Lost, now: float) -> None:
        """A process is gone. Legs move on the leader's word only: it places nothing there now."""
        self._tokenizing.died(message.instance)
        if isinstance(message, Died) or message.term < self.leading.term:
            return
        for session in list(self._sessions.values()):
            for leg in session.legs:
                cause = leg.lost_with(message.instance, hung=message.hung)
                if cause is not None:
                    self._redrive(session, leg, cause, now)

    def _on_beacon(self, message: Beacon, now: float) -> None:
        if message.pool != self._pool:
            return
        changed = self.leading.hear(message)
        if self.leading.max_model_len:
            waiting, self._waiting = self._waiting, {}
            for session in waiting.values():
                self._open_legs(session, now)
        if not changed:
            return
        for session in list(self._sessions.values()):
            for leg in session.legs:
                if leg.state == "submitted" or (leg.state == "accepted" and not leg.worker):
                    self._redrive(session, leg, "leader", now)

    def _redrive(
        self,
        session: Session,
        leg: Leg,
        cause: Cause,
        now: float,
        error: MeshError | None = None,
    ) -> None:
        """The one place where a leg is driven again, or its session ends for want of attempts."""
        if session.ended:  # for the sake of an earlier leg
            return
        end = self._redrives.plan(session, leg, cause, now, error)
        if end is not None:
            self._end(session, end)

    def slept(self, now: float) -> None:
        """We slept or were cut off: nobody else's silence counts before `now`."""
        self.counters["clock_restarts"] += 1
        self._tokenizing.restart(now)
        for session in self._sessions.values():
            for leg in session.legs:
                leg.forget_questions()
        self._redrives.restart(now)

    def _end_if_finished(self, session: Session) -> None:
        if session.finished and not session.ended:
            self._end(session, None)

    def _end(self, session: Session, error: MeshError | None) -> None:
        """The one end of a session; whatever of it still runs is cancelled."""
        request_id = session.spec.request_id
        del self._sessions[request_id]
        self._num_legs -= session.num_prompts * session.spec.n
        self._tokenizing.close(request_id)
        self._waiting.pop(request_id, None)
        for leg in session.legs:
            self._redrives.forget(leg)
            if leg.state != "ended" and leg.epoch:
                for holder in leg.holders:
                    self.outbox.put(inbox(holder), session.cancel(leg, leg.epoch, "ended"))
        self.counters[f"end_{error.code if error else 'finished'}"] += 1
        session.end(error)
