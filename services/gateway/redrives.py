"""When a leg is submitted, and submitted again: paced, highest class first. Pure."""

import random
from collections import Counter

from services.gateway.peers import Leader
from services.gateway.session import Cause, Leg, Session
from shared.core import Outbox
from shared.errors import MeshError, Unavailable
from shared.subjects import inbox

JITTER_S = 0.05
BURST_S = 0.1  # unused pace is kept for so long


class Redrives:
    """Legs whose Submit is due, and legs whose Submit nobody has accepted yet."""

    def __init__(
        self, gateway: str, leader: Leader, outbox: Outbox, rng: random.Random, per_s: float
    ) -> None:
        self.counters: Counter[str] = Counter()  # by cause
        self._gateway = gateway
        self._leader = leader
        self._outbox = outbox
        self._rng = rng
        self._per_s = per_s
        self._pending: dict[Leg, Session] = {}
        self._unaccepted: dict[Leg, Session] = {}
        self._budget = per_s * BURST_S
        self._budget_at = 0.0

    def __len__(self) -> int:
        return len(self._pending) + len(self._unaccepted)

    def jitter(self) -> float:
        return self._rng.random() * JITTER_S

    def submit(self, session: Session, leg: Leg, now: float) -> None:
        """Send `leg` to the leader under a fresh epoch; with no leader it stays due."""
        self._pending.pop(leg, None)
        if session.finish_by_ids(leg):
            return
        if not self._leader.instance:
            leg.due = now
            self._pending[leg] = session
            return
        leg.submitted(self._leader.instance, now)
        self._unaccepted[leg] = session
        self._outbox.put(inbox(leg.scheduler), session.submit(leg, self._gateway, now))

    def plan(
        self,
        session: Session,
        leg: Leg,
        cause: Cause,
        now: float,
        error: MeshError | None = None,
    ) -> MeshError | None:
        """Make a Submit of `leg` due because of `cause`. The error that ends the session instead,
        when the leg's attempts are used up.
        """
        if leg.state in ("pending", "ended"):
            return None
        self.counters[cause] += 1
        self._unaccepted.pop(leg, None)
        if leg.plan(cause, now, 0.0 if cause == "resend" else self.jitter()):
            self._pending[leg] = session
            return None
        if error is not None:
            return error
        if leg.poisonous:
            return MeshError(f"{leg.deaths} processes in a row died of this request.")
        return Unavailable(f"{leg.attempts} attempts in a row failed.", retry_after_s=1.0)

    def accepted(self, leg: Leg) -> None:
        """Somebody has the epoch: no re-send for lack of `Accepted`."""
        self._unaccepted.pop(leg, None)
        leg.accepted()

    def forget(self, leg: Leg) -> None:
        self._pending.pop(leg, None)
        self._unaccepted.pop(leg, None)

    def send_due(self, now: float) -> list[Session]:
        """Re-send what nobody accepted, then send what is due. The sessions that were touched."""
        for leg, session in list(self._unaccepted.items()):
            if now >= leg.due:
                self.plan(session, leg, "resend", now)
        burst = self._per_s * BURST_S
        self._budget = min(self._budget + (now - self._budget_at) * self._per_s, burst)
        self._budget_at = now
        if not self._leader.instance:
            return []
        due = [leg for leg, session in self._pending.items() if leg.due <= now]
        due.sort(key=lambda leg: (self._pending[leg].spec.priority, leg.due))
        touched = []
        for leg in due[: int(self._budget)]:
            self._budget -= 1
            session = self._pending[leg]
            self.submit(session, leg, now)
            touched.append(session)
        return touched

    def restart(self, now: float) -> None:
        """We slept, were cut off or deaf: an `Accepted` may still be on its way to us."""
        for leg in self._unaccepted:
            leg.due = max(leg.due, now + leg.resend_s)
