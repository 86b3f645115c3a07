"""When holders are asked about their legs, and when sessions run out of time. Pure."""

import heapq
import random
from collections import defaultdict
from collections.abc import Container, Iterable

from services.gateway.session import Leg, Session
from shared.core import Outbox
from shared.messages import Beat, Renew, RenewLeg
from shared.subjects import inbox

RENEW_S = 1.0
RENEW_JITTER = 0.1  # of the period, so that gateways do not beat in time
QUICK_RENEW_S = 0.25  # for QUICK_FOR_S after our own reconnect: find lost tails soon
QUICK_FOR_S = 1.5
RENEW_LEGS_MAX = 1024  # in one message, about 50 KB


class Renewals:
    """One `Renew` per holder and period."""

    def __init__(self, gateway: str, outbox: Outbox, rng: random.Random) -> None:
        self._gateway = gateway
        self._outbox = outbox
        self._rng = rng
        self._due: float | None = None
        self._quick_until = 0.0
        self._steps: dict[str, int] = {}  # that a worker was in when it was heard last
        self._asked_in: dict[str, int] = {}  # that it was in when asked what it has not answered

    def beat(self, beat: Beat) -> None:
        """A worker reads between two steps, and a step may take seconds."""
        if beat.role == "gpu_worker" and beat.phase != "idle":
            self._steps[beat.instance] = beat.step
        else:
            self._steps.pop(beat.instance, None)

    def reconnected(self, now: float) -> None:
        """Ask soon and often for a while; these questions may go unanswered."""
        self._quick_until = now + QUICK_FOR_S
        self._due = now + 0.1 * QUICK_RENEW_S * self._rng.random()

    def apart_s(self, now: float) -> float:
        """How far apart two answers must be to come from two questions."""
        return 0.8 * (QUICK_RENEW_S if now < self._quick_until else RENEW_S)

    def ask(self, sessions: Iterable[Session], now: float) -> list[tuple[Session, Leg]]:
        """Ask if it is time. Legs whose holder left too many questions unanswered."""
        if self._due is None:
            self._due = now + RENEW_S * self._rng.random()
        if now < self._due:
            return []
        quick = now < self._quick_until
        period = QUICK_RENEW_S if quick else RENEW_S
        self._due = now + period * (1 + RENEW_JITTER * (2 * self._rng.random() - 1))
        silent: list[tuple[Session, Leg]] = []
        questions: defaultdict[str, list[RenewLeg]] = defaultdict(list)
        for session in sessions:
            for leg in session.legs:
                if leg.state not in ("accepted", "running"):
                    continue
                if not quick and self._could_read(leg.holder) and leg.ask():
                    silent.append((session, leg))
                    continue
                questions[leg.holder].append(
                    RenewLeg(session.spec.request_id, leg.choice, leg.epoch, leg.delivered)
                )
        self._note_steps(questions)
        for holder, legs in questions.items():
            for start in range(0, len(legs), RENEW_LEGS_MAX):
                batch = legs[start : start + RENEW_LEGS_MAX]
                self._outbox.put(inbox(holder), Renew(gateway=self._gateway, legs=batch))
        return silent

    def _could_read(self, holder: str) -> bool:
        """Whether its silence says anything. Who hangs in a step is found by its beats."""
        step = self._steps.get(holder)
        return step is None or step > self._asked_in.get(holder, -2) + 1

    def _note_steps(self, holders: Iterable[str]) -> None:
        """All `holders` are asked now; of others nothing need be known."""
        self._asked_in = {
            holder: self._steps[holder] if self._could_read(holder) else self._asked_in[holder]
            for holder in holders
            if holder in self._steps
        }
        self._steps = {holder: self._steps[holder] for holder in self._asked_in}


class Deadlines:
    """Session deadlines; an ended session's entry is dropped when most entries are such."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []

    def add(self, request_id: str, deadline: float) -> None:
        heapq.heappush(self._heap, (deadline, request_id))

    def overdue(self, live: Container[str], num_live: int, now: float) -> list[str]:
        """Request ids, of those in `live`, whose deadline has passed; each is named once."""
        overdue = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id = heapq.heappop(self._heap)
            if request_id in live:
                overdue.append(request_id)
        if len(self._heap) > 64 + 4 * num_live:
            self._heap = [entry for entry in self._heap if entry[1] in live]
            heapq.heapify(self._heap)
        return overdue
