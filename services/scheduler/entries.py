"""What a scheduler knows of legs: those queued or placed, and those that are over. Pure."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from services.scheduler.fairness import Waiting
from services.scheduler.placement import Need
from services.scheduler.workers import Key
from shared.messages import Submit


@dataclass(slots=True, eq=False, kw_only=True)
class Entry(Waiting):
    """One leg at one epoch: queued until `worker` is set, placed from then on."""

    submit: Submit
    need: Need
    lease_until: float
    worker: str = ""
    detokenizer: str = ""

    @property
    def key(self) -> Key:
        return self.submit.request_id, self.submit.choice

    @property
    def epoch(self) -> int:
        return self.submit.epoch


class Entries:
    """One entry per leg. A leg that leaves keeps a tombstone: its epoch is never placed again."""

    def __init__(self, tombstones_max: int, tombstone_s: float) -> None:
        self._entries: dict[Key, Entry] = {}
        self._over: OrderedDict[Key, tuple[int, float]] = OrderedDict()
        self._over_max = tombstones_max
        self._over_s = tombstone_s

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        return self._entries.get(key)

    def all(self) -> list[Entry]:
        return list(self._entries.values())

    def put(self, entry: Entry) -> None:
        """Take the place of a lower epoch, if there is one."""
        self._entries[entry.key] = entry

    def remove(self, entry: Entry, now: float) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        self.bury(entry.key, entry.epoch, now)

    def bury(self, key: Key, epoch: int, now: float) -> None:
        """All epochs of the leg up to `epoch` are over."""
        known, _ = self._over.get(key, (0, 0.0))
        self._over[key] = (max(known, epoch), now)
        self._over.move_to_end(key)
        if len(self._over) > self._over_max:
            self._over.popitem(last=False)

    def is_over(self, key: Key, epoch: int) -> bool:
        known, _ = self._over.get(key, (0, 0.0))
        return epoch <= known

    def expire(self, now: float) -> None:
        """Drop tombstones that nobody can stumble over any more."""
        while self._over:
            key, (_, at) = next(iter(self._over.items()))
            if now - at < self._over_s:
                return
            del self._over[key]


def is_redrive(submit: Submit) -> bool:
    """Whether some scheduler may have taken this leg before: it is never shed."""
    return submit.epoch > 1


def named(submit: Submit) -> dict[str, Any]:
    """The fields that name the leg and epoch of `submit` in an answer."""
    return {"request_id": submit.request_id, "choice": submit.choice, "epoch": submit.epoch}
