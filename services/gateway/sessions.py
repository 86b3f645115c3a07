"""All sessions of one gateway: who is asked what, and who is driven again. Pure.

Every fault downstream ends in `_redrive`: a lost message, a dead process, a reconnect, a hang.
"""

import heapq
import random
from collections import Counter, defaultdict

from msgspec import Struct

from services.gateway.events import Emit, SessionSpec
from services.gateway.peers import Leader
from services.gateway.session import Cause, Leg, Session
from services.gateway.tokenizing import Tokenizing
from shared.core import Outbox
from shared.errors import (
    ERRORS,
    Cancelled,
    DeadlineExceeded,
    MeshError,
    Overloaded,
    Unavailable,
)
from shared.liveness import Watcher
from shared.messages import (
    Accepted,
    Beacon,
    Beat,
    Cancel,
    Detokenized,
    Died,
    Failed,
    Lost,
    NotLeader,
    Renew,
    Renewed,
    RenewLeg,
    RouteLost,
    Started,
    TextDelta,
    TextRecord,
    ToGateway,
    Tokenized,
)
from shared.subjects import inbox

RENEW_S = 1.0
RENEW_JITTER = 0.1  # of the period, so that gateways do not beat in time
QUICK_RENEW_S = 0.25  # for QUICK_FOR_S after our own reconnect: find lost tails soon
QUICK_FOR_S = 1.5
RENEW_LEGS_MAX = 1024  # in one message, about 50 KB
REDRIVE_JITTER_S = 0.05

LOST: dict[str, Cause] = {"worker_lost": "worker_death", "detokenizer_lost": "detokenizer_death"}


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
        self.counters: Counter[str] = Counter()  # redrive_<cause>, end_<code>, dropped_<why>
        self._gateway = gateway
        self._pool = pool
        self._rng = rng
        self._limits = limits or Limits()
        self._leader = Leader()
        self._watcher = Watcher()
        self._tokenizing = Tokenizing(gateway, self.outbox)
        self._sessions: dict[str, Session] = {}
        self._num_legs = 0
        self._deadlines: list[tuple[float, str]] = []
        self._waiting: dict[str, Session] = {}  # tokenized, but the model's context is not known
        self._pending: dict[Leg, Session] = {}
        self._unaccepted: dict[Leg, Session] = {}
        self._budget = 0.0  # re-drives that may be sent now
        self._budget_at: float | None = None
        self._renew_at: float | None = None
        self._quick_until = 0.0

    @property
    def leader(self) -> str:
        """Instance of the leading scheduler, "" before the first beacon."""
        return self._leader.instance

    @property
    def term(self) -> int:
        """The highest term heard; our beats echo it."""
        return self._leader.term

    @property
    def workers(self) -> int:
        """Workers of the pool that are ready, as its leader last said."""
        return self._leader.workers

    @property
    def tokenizers(self) -> int:
        """Live tokenizers."""
        return len(self._tokenizing.tokenizers)

    @property
    def max_model_len(self) -> int:
        """Ids of prompt and output together; 0 = not known yet."""
        return self._leader.max_model_len

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_legs(self) -> int:
        return self._num_legs

    def choose_tokenizer(self) -> str:
        """A live tokenizer for `Detokenize` and plain `/tokenize`; "" = none."""
        return self._tokenizing.tokenizers.choose([])

    # --- the owner's commands ---

    def open(self, spec: SessionSpec, emit: Emit, now: float) -> None:
        """Begin a session; `emit` gets its events, `SessionEnd` last, also when it is refused."""
        assert spec.request_id not in self._sessions
        session = Session(spec, emit, self._rng.getrandbits(64), now)
        legs = session.num_prompts * spec.n
        full = len(self._sessions) >= self._limits.sessions
        if full or self._num_legs + legs > self._limits.legs:
            self.counters["end_overloaded"] += 1
            session.end(Overloaded("too many requests are open here.", retry_after_s=1.0))
            return
        self._sessions[spec.request_id] = session
        self._num_legs += legs
        heapq.heappush(self._deadlines, (session.deadline, spec.request_id))
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
        self._restart(now)
        self._quick_until = now + QUICK_FOR_S
        self._renew_at = now + self._jitter()

    # --- messages ---

    def receive(self, message: ToGateway, now: float) -> None:
        """Take one message; strangers, duplicates and lower epochs are dropped."""
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
                if message.role == "tokenizer":
                    self._tokenizing.beat(message, now)
            case Died():
                self._tokenizing.died(message.instance)
            case Lost():
                self._on_lost(message, now)
            case Detokenized():
                self.counters["dropped_detokenized"] += 1  # the edge reads its own before us

    def tick(self, now: float) -> None:
        """Judge what time has made true: our own sleep first, deadlines even when cut off."""
        if self._watcher.slept(now):
            self._restart(now)
        self._end_overdue(now)
        if not self._watcher.connected:
            return
        for request_id, error in self._tokenizing.tick(now):
            self._end(self._sessions[request_id], error)
        for leg, session in list(self._unaccepted.items()):
            if now >= leg.due:
                self._redrive(session, leg, "resend", now)
        self._send_due(now)
        if self._renew_at is None:
            self._renew_at = now + RENEW_S * self._rng.random()
        if now >= self._renew_at:
            self._renew(now)

    # --- opening ---

    def _on_tokenized(self, message: Tokenized, now: float) -> None:
        session = self._tokenizing.answered(message)
        if session is None:
            return
        if len(session.prompts) != session.num_prompts:
            self._end(session, MeshError("the tokenizer answered for another number of prompts."))
        elif self.max_model_len == 0:
            self._waiting[session.spec.request_id] = session
        else:
            self._open_legs(session, now)

    def _open_legs(self, session: Session, now: float) -> None:
        try:
            session.open_legs(self.max_model_len)
        except MeshError as error:
            self._end(session, error)
            return
        for leg in session.legs:
            leg.due = now
            self._submit(session, leg, now)
        self._end_if_finished(session)

    def _submit(self, session: Session, leg: Leg, now: float) -> None:
        """Send `leg` to the leader under a fresh epoch, or keep it due until there is one."""
        if session.finish_by_ids(leg):
            self._pending.pop(leg, None)
            return
        if not self._leader.instance or not self._watcher.connected:
            self._pending[leg] = session
            return
        self._pending.pop(leg, None)
        leg.submitted(self._leader.instance, now)
        self._unaccepted[leg] = session
        self.outbox.put(inbox(leg.scheduler), session.submit(leg, self._gateway, now))

    # --- answers about one leg ---

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
                self._unaccepted.pop(leg, None)
                if leg.state != "pending":
                    leg.state = "running"
                self._cancel_elsewhere(session, leg)
            case Accepted():
                if message.term >= self.term:
                    self._unaccepted.pop(leg, None)
                    leg.accepted()
            case NotLeader():
                # Not taken. The re-send that is due anyway goes to whoever leads by then.
                if self._leader.hear_of(message.term, message.leader) and leg.state == "submitted":
                    self._redrive(session, leg, "leader", now)
            case RouteLost():
                if message.term == 0 or message.term >= self.term:
                    self._redrive(session, leg, LOST.get(message.reason, "moved"), now)

    def _cancel_elsewhere(self, session: Session, leg: Leg) -> None:
        """The leg runs on another worker now: free what an earlier epoch may still hold."""
        if leg.last_worker and leg.last_worker != leg.worker:
            self._put_cancel(session, leg, leg.last_worker, leg.last_epoch, "moved")
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
        self._unaccepted.pop(leg, None)
        if verdict == "gap":
            self._redrive(session, leg, "gap", now)
            return
        session.deliver(record)
        if leg.state == "ended":
            self._pending.pop(leg, None)
            self._end_if_finished(session)

    def _on_failed(self, message: Failed, now: float) -> None:
        session = self._sessions.get(message.request_id)
        if session is None:
            return
        kind = ERRORS.get(message.code, MeshError)
        error = kind(message.detail, param=message.param, retry_after_s=message.retry_after_s)
        if message.choice < 0:
            if not message.retryable:
                self._end(session, error)
            elif self._tokenizing.failed(message.request_id):
                self.counters["tokenizer_failed"] += 1
            return
        found = self._find(message.request_id, message.choice)
        if found is None or found[1].epoch != message.epoch or found[1].state == "ended":
            return
        if message.retryable:
            self._redrive(session, found[1], "failed" if message.started else "refused", now, error)
        else:
            self._end(session, error)

    def _on_renewed(self, message: Renewed, now: float) -> None:
        quick = now < self._quick_until
        apart_s = 0.8 * (QUICK_RENEW_S if quick else RENEW_S)
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

    def _on_lost(self, message: Lost, now: float) -> None:
        self._tokenizing.died(message.instance)
        if message.term < self.term:
            return
        for session in list(self._sessions.values()):
            for leg in session.legs:
                if leg.state in ("pending", "ended"):
                    continue
                if leg.worker == message.instance:
                    self._redrive(session, leg, "hang" if message.hung else "worker_death", now)
                elif leg.detokenizer == message.instance:
                    self._redrive(
                        session, leg, "hang" if message.hung else "detokenizer_death", now
                    )

    def _on_beacon(self, message: Beacon, now: float) -> None:
        if message.pool != self._pool:
            return
        changed = self._leader.hear(message)
        if self.max_model_len:
            waiting, self._waiting = self._waiting, {}
            for session in waiting.values():
                self._open_legs(session, now)
        if not changed:
            return
        for session in list(self._sessions.values()):
            for leg in session.legs:
                if leg.state == "submitted" or (leg.state == "accepted" and not leg.worker):
                    self._redrive(session, leg, "leader", now)

    # --- re-drives ---

    def _redrive(
        self,
        session: Session,
        leg: Leg,
        cause: Cause,
        now: float,
        error: MeshError | None = None,
    ) -> None:
        """The one place where a leg is driven again. It goes out when `_send_due` says so."""
        if leg.state in ("pending", "ended"):
            return
        self.counters[f"redrive_{cause}"] += 1
        self._unaccepted.pop(leg, None)
        if leg.plan(cause, now, 0.0 if cause == "resend" else self._jitter()):
            self._pending[leg] = session
        elif leg.deaths and not error:
            self._end(session, MeshError(f"{leg.deaths} workers died while they ran this request."))
        else:
            self._end(session, error or Unavailable("every attempt to go on failed."))

    def _send_due(self, now: float) -> None:
        """Send due Submits, highest class first, at most `redrives_per_s`."""
        rate = self._limits.redrives_per_s
        elapsed = now - (self._budget_at if self._budget_at is not None else now - 1.0)
        self._budget, self._budget_at = min(self._budget + elapsed * rate, rate / 10), now
        if not self._pending or not self._leader.instance:
            return
        due = [leg for leg in self._pending if leg.due <= now]
        due.sort(key=lambda leg: (self._pending[leg].spec.priority, leg.due))
        for leg in due[: int(self._budget)]:
            self._budget -= 1
            session = self._pending[leg]
            self._submit(session, leg, now)
            self._end_if_finished(session)

    def _jitter(self) -> float:
        return self._rng.random() * REDRIVE_JITTER_S

    # --- renewals and clocks ---

    def _renew(self, now: float) -> None:
        """Ask each holder about its legs, in one message."""
        quick = now < self._quick_until
        period = QUICK_RENEW_S if quick else RENEW_S
        self._renew_at = now + period * (1 + RENEW_JITTER * (2 * self._rng.random() - 1))
        questions: defaultdict[str, list[RenewLeg]] = defaultdict(list)
        for session in list(self._sessions.values()):
            for leg in session.legs:
                if leg.state not in ("accepted", "running"):
                    continue
                if not quick and leg.ask():
                    self._redrive(session, leg, "unanswered", now)
                    continue
                questions[leg.holder].append(
                    RenewLeg(session.spec.request_id, leg.choice, leg.epoch, leg.delivered)
                )
        for holder, legs in questions.items():
            for start in range(0, len(legs), RENEW_LEGS_MAX):
                batch = legs[start : start + RENEW_LEGS_MAX]
                self.outbox.put(inbox(holder), Renew(gateway=self._gateway, legs=batch))

    def _restart(self, now: float) -> None:
        """We slept or were cut off: nobody else's silence counts before `now`."""
        self.counters["clock_restarts"] += 1
        self._tokenizing.restart(now)
        for session in self._sessions.values():
            for leg in session.legs:
                leg.forget_questions()
        for leg in self._unaccepted:
            leg.due = max(leg.due, now + leg.resend_s)

    # --- ends ---

    def _end_overdue(self, now: float) -> None:
        while self._deadlines and self._deadlines[0][0] <= now:
            _, request_id = heapq.heappop(self._deadlines)
            session = self._sessions.get(request_id)
            if session is not None:
                timeout_s = session.spec.timeout_s
                self._end(session, DeadlineExceeded(f"no answer within {timeout_s:g} s."))
        if len(self._deadlines) > 64 + 4 * len(self._sessions):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._sessions]
            heapq.heapify(self._deadlines)

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
            self._pending.pop(leg, None)
            self._unaccepted.pop(leg, None)
            if leg.state != "ended" and leg.epoch:
                for holder in {leg.scheduler, leg.worker or leg.last_worker} - {""}:
                    self._put_cancel(session, leg, holder, leg.epoch, "ended")
        self.counters[f"end_{error.code if error else 'finished'}"] += 1
        session.end(error)

    def _put_cancel(self, session: Session, leg: Leg, holder: str, epoch: int, reason: str) -> None:
        cancel = Cancel(
            request_id=session.spec.request_id, choice=leg.choice, epoch=epoch, reason=reason
        )
        self.outbox.put(inbox(holder), cancel)
