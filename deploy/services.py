"""The services of one cluster while it runs: scaled up and down, and replaced one by one."""

from collections.abc import Callable

from deploy.child import Child, ChildSpec
from deploy.children import Children
from deploy.config import REPLICAS_MAX, ROLES, ClusterTable
from deploy.control import Tell
from deploy.errors import ClusterError


class Services:
    """`tell` in what follows shows a line to the person who asked. It raises `ConnectionError` when
    that one has gone (Ctrl-C), which ends a change between two processes.

    `spec(role, ordinal, replicas)` describes one process of them; `retired` hears of those that
    were stopped, so that nobody waits for them.
    """

    def __init__(
        self,
        children: Children,
        table: ClusterTable,
        spec: Callable[[str, int, Callable[[], int]], ChildSpec],
        retired: Callable[[Child], None],
    ) -> None:
        self._children = children
        self._table = table
        self._spec = spec
        self._retired = retired
        self._counts = dict.fromkeys(ROLES, 0)

    def start(self, role: str, count: int) -> list[Child]:
        """Have `count` processes of `role`, if there are fewer; those that were started for it."""
        first, self._counts[role] = self._counts[role], count
        specs = [self._spec(role, i, lambda: self._counts[role]) for i in range(first, count)]
        return [self._children.keep(spec) for spec in specs]

    async def scale(self, role: str, count: int, tell: Tell) -> None:
        """Have `count` processes of `role`: returns when new ones are ready, or when those that are
        too many, the highest ordinals, have drained. Raises `ClusterError`.
        """
        if role not in ROLES:
            raise ClusterError(f"There is no role {role!r}; there are: {', '.join(ROLES)}.")
        if not 1 <= count <= REPLICAS_MAX:
            raise ClusterError(f"{role}={count}: there can be 1 to {REPLICAS_MAX} of a role.")
        before = self._counts[role]
        tell(f"{role}: {before} -> {count}")
        started = self.start(role, count)
        try:
            await self._children.until_ready(started, self._table.ready_timeout_s)
        except ClusterError:
            self._counts[role] = before
            await self._children.end(started, 0.0)
            raise
        self._counts[role] = count
        surplus = [c for c in self._children.of(role) if c.spec.ordinal >= count]
        await self._retire(*surplus)

    async def roll(self, names: list[str], tell: Tell) -> None:
        """Replace every process, or those whose role or name is in `names`. Raises `ClusterError`,
        then the rest is left as it was.

        One process at a time. A role that has several goes on with the others; for the only one of
        its role a spare takes over before it goes.
        """
        everyone = self._children.of(*ROLES)
        known = {name for child in everyone for name in (child.spec.role, child.spec.name)}
        for name in names:
            if name not in known:
                raise ClusterError(f"There is no {name!r}; there are: {', '.join(sorted(known))}.")
        chosen = [c for c in everyone if not names or {c.spec.role, c.spec.name} & set(names)]
        for number, child in enumerate(chosen, 1):
            tell(f"{child.spec.name} ({number} of {len(chosen)})")
            await self._replace(child)

    async def _replace(self, old: Child) -> None:
        only = self._counts[old.spec.role] == 1
        if not only:
            await self._retire(old)
        new = self._children.keep(old.spec)
        try:
            await self._children.until_ready([new], self._table.ready_timeout_s)
        except ClusterError:
            if only:
                await self._children.end([new], 0.0)
            raise
        if only:
            await self._retire(old)

    async def _retire(self, *children: Child) -> None:
        await self._children.end(children, self._table.retire_s)
        for child in children:
            self._retired(child)
