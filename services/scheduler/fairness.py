"""In which order waiting legs are placed. Pure.

Classes are strict bands, lifted by one for each `aging_s` that their oldest leg has waited. In a
band re-drives go first (a client is in mid-sentence), then tenants in turn by the ids they have
been given (start-time fair queueing), then the earliest deadline.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

TENANTS_MAX = 1024  # remembered beyond those that are owed or owe


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting:
    """What the queue must know of a leg; `tokens` is what its tenant is charged for it."""

    priority: int
    tenant: str
    tokens: int
    deadline: float
    arrived: float
    redrive: bool = False
    gone: bool = False  # left the queue; heaps drop it when they meet it


W = TypeVar("W", bound=Waiting)
Heap = list[tuple[float, int, W]]


@dataclass(slots=True, eq=False)
class Band(Generic[W]):
    """One class. Each heap is ordered by what comes first in it."""

    redrives: Heap[W] = field(default_factory=list)
    tenants: dict[str, Heap[W]] = field(default_factory=dict)
    by_age: Heap[W] = field(default_factory=list)


class FairQueue(Generic[W]):
    """Waiting legs of one pool."""

    def __init__(self, aging_s: float, weights: dict[str, float]) -> None:
        self._aging_s = aging_s
        self._weights = weights
        self._bands: dict[int, Band[W]] = {}
        self._served: dict[str, float] = {}  # virtual time of tenants that wait
        self._virtual_now = 0.0
        self._order = count()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def add(self, waiting: W) -> None:
        band = self._bands.setdefault(waiting.priority, Band())
        order = next(self._order)
        heapq.heappush(band.by_age, (waiting.arrived, order, waiting))
        if waiting.redrive:
            heapq.heappush(band.redrives, (waiting.arrived, order, waiting))
        else:
            heap = band.tenants.setdefault(waiting.tenant, [])
            heapq.heappush(heap, (waiting.deadline, order, waiting))
        # A tenant that was away has not saved up a share meanwhile.
        served = self._served.get(waiting.tenant, 0.0)
        self._served[waiting.tenant] = max(served, self._virtual_now)
        self._size += 1

    def remove(self, waiting: W) -> None:
        """Take a leg out of the queue without a charge; twice does nothing."""
        if not waiting.gone:
            waiting.gone = True
            self._size -= 1
            if not self._size:  # nobody waits: shares begin anew
                self._bands.clear()
                self._served.clear()
                self._virtual_now = 0.0

    def first(self, now: float) -> W | None:
        """The leg whose turn it is."""
        best: tuple[int, int] | None = None
        for priority, band in list(self._bands.items()):
            oldest = _top(band.by_age)
            if oldest is None:
                del self._bands[priority]
                continue
            rank = priority - int((now - oldest.arrived) / self._aging_s)
            if best is None or (rank, priority) < best:
                best = (rank, priority)
        if best is None:
            return None
        _, priority = best
        band = self._bands[priority]
        if priority > min(self._bands):  # its age has lifted it: the oldest goes, whoever's it is
            return _top(band.by_age)
        return _top(band.redrives) or self._first_by_share(band)

    def charge(self, waiting: W) -> None:
        """The leg was placed: take it out and count its ids against its tenant."""
        tenant = waiting.tenant
        served = self._served.get(tenant, self._virtual_now)
        self._virtual_now = max(self._virtual_now, served)
        self._served[tenant] = served + waiting.tokens / self._weights.get(tenant, 1.0)
        if len(self._served) > TENANTS_MAX:  # those not ahead of the others are as good as new
            self._served = {t: at for t, at in self._served.items() if at > self._virtual_now}
        self.remove(waiting)

    def _first_by_share(self, band: Band[W]) -> W | None:
        heads: list[tuple[float, float, str, W]] = []
        for tenant, heap in list(band.tenants.items()):
            head = _top(heap)
            if head is None:
                del band.tenants[tenant]
            else:
                heads.append(
                    (self._served.get(tenant, self._virtual_now), head.arrived, tenant, head)
                )
        return min(heads)[3] if heads else None


def _top(heap: Heap[W]) -> W | None:
    while heap and heap[0][2].gone:
        heapq.heappop(heap)
    return heap[0][2] if heap else None
