"""Whom a gateway talks to: the pool's leader by its beacons, tokenizers by their beats. Pure."""

from shared.liveness import LastHeard
from shared.messages import Beacon, Beat


class Leader:
    """The scheduler instance that leads the pool: the highest (term, id) heard wins for good."""

    def __init__(self) -> None:
        self.instance = ""  # before the first beacon
        self.term = 0  # our beats echo it
        self.max_model_len = 0  # ids of prompt and output together; 0 = not known yet
        self.workers = 0  # of the pool that are ready
        self.model = ""
        self.kv_policy = ""

    def hear(self, beacon: Beacon) -> bool:
        """True when this beacon shows a new leader, or the old one in a new term."""
        claim = (beacon.term, beacon.scheduler)
        if claim < (self.term, self.instance):
            return False
        changed = claim != (self.term, self.instance)
        self.term, self.instance = claim
        self.workers = beacon.workers
        self.model = beacon.model or self.model
        self.kv_policy = beacon.kv_policy
        # A pool without workers for a moment does not forget what its model can hold.
        self.max_model_len = beacon.max_model_len or self.max_model_len
        return changed


class Tokenizers:
    """Live tokenizers and how many of our questions each has in hand."""

    def __init__(self) -> None:
        self._heard = LastHeard()
        self._in_hand: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._in_hand)

    def __contains__(self, instance: str) -> bool:
        return instance in self._in_hand

    def beat(self, beat: Beat, now: float) -> None:
        if not beat.ready or beat.draining:
            self.drop(beat.instance)
            return
        self._heard.heard(beat.instance, now)
        self._in_hand.setdefault(beat.instance, 0)

    def drop(self, instance: str) -> None:
        self._heard.forget(instance)
        self._in_hand.pop(instance, None)

    def drop_silent(self, now: float) -> None:
        for instance in self._heard.silent(now):
            self.drop(instance)

    def restart(self, now: float) -> None:
        self._heard.restart(now)

    def choose(self, tried: list[str]) -> str:
        """The one with the least of our work, one not yet tried before any other; "" = none."""
        if not self._in_hand:
            return ""
        return min(self._in_hand, key=lambda name: (tried.count(name), self._in_hand[name], name))

    def asked(self, instance: str) -> int:
        """Count a question to a live one; how many of ours it had in hand before."""
        before = self._in_hand[instance]
        self._in_hand[instance] = before + 1
        return before

    def answered(self, instance: str) -> None:
        if self._in_hand.get(instance, 0) > 0:
            self._in_hand[instance] -= 1
