"""All processes of one cluster: kept running, waited for, ended."""

import asyncio
from collections.abc import Callable, Iterable, Iterator

from deploy.child import Child, ChildSpec
from deploy.errors import ClusterError
from deploy.logs import last_line


class Children:
    """The servers and services that are to run now, in the order in which they were started."""

    def __init__(self, died: Callable[[Child, str], None]) -> None:
        self._died = died
        self._changed = asyncio.Event()
        self._tasks: dict[Child, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[Child]:
        return iter(list(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def of(self, *roles: str) -> list[Child]:
        """Those of `roles`, by their names."""
        found = (child for child in self._tasks if child.spec.role in roles)
        return sorted(found, key=lambda child: (roles.index(child.spec.role), child.spec.ordinal))

    def keep(self, spec: ChildSpec) -> Child:
        """Start it, and start it again, from now on."""
        child = Child(spec, self._died, self._changed.set)
        self._tasks[child] = asyncio.create_task(child.run())
        return child

    async def end(self, children: Iterable[Child], grace_s: float) -> None:
        """Stop them; they are no children any more when they are gone."""
        ending = list(children)
        await asyncio.gather(*(child.stop(grace_s) for child in ending))
        if ending:  # `wait`, because a cancellation of ours is none of their runs
            await asyncio.wait([self._tasks[child] for child in ending])
        for child in ending:
            self._tasks.pop(child).result()

    async def until_ready(
        self, children: list[Child], timeout_s: float, looked: Callable[[], None] = lambda: None
    ) -> None:
        """Wait for all of them, and call `looked` whenever one has changed.

        Raises `ClusterError` when one is given up or time is out.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while any(child.state != "ready" for child in children):
                    raise_failed(children)
                    self._changed.clear()
                    await self._changed.wait()
                    looked()
        except TimeoutError:
            waiting = [child.spec.name for child in children if child.state != "ready"]
            logs = children[0].spec.log.parent
            raise ClusterError(
                f"Not ready after {timeout_s:g} s: {', '.join(waiting)}; see {logs}."
            ) from None


def raise_failed(children: Iterable[Child]) -> None:
    """Raise `ClusterError` with the reason of the first that was given up."""
    for child in children:
        if child.state != "failed":
            continue
        if child.spec.server is not None:
            raise ClusterError(f"{child.spec.server.why_not()}.")
        reason = f"{child.spec.name} cannot run ({child.reason})"
        raise ClusterError(f"{reason}: {last_line(child.spec.log)}")
