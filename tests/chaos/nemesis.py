"""What can be done to processes: each fault is one class, and says how it knows that it was there.

`inject` returns its proof or raises `NotInjected`; `heal` undoes what does not undo itself.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from tests.chaos.asks import Ask
from tests.chaos.site import POLL_S, Site, Victim, state_of
from tests.chaos.workload import Clients

PROOF_S = 5.0  # for what was done to be seen


class NotInjected(Exception):
    """The fault did not take place; a round without it proves nothing."""


class Field(NamedTuple):
    """What a fault may reach."""

    site: Site
    clients: Clients
    asks: list[Ask]  # whose right answers are known
    rng: random.Random


class Fault(Protocol):
    """One way to break something."""

    async def inject(self, field: Field) -> str:
        """Do it; how it is known to have been done. Raises `NotInjected`."""

    async def heal(self) -> None:
        """Undo it."""


class Kill:
    """A signal that ends processes; the supervisor starts them again."""

    def __init__(
        self,
        target: str,
        *,
        everyone: bool = False,
        number: signal.Signals = signal.SIGKILL,
        within_s: float = PROOF_S,
    ) -> None:
        self._target = target
        self._everyone = everyone
        self._number = number
        self._within_s = within_s  # to be gone; a process that drains takes its time

    async def inject(self, field: Field) -> str:
        victims = await choose(field, self._target, everyone=self._everyone)
        for victim in victims:
            send(victim, self._number)
        for victim in victims:
            await seen(
                lambda pid=victim.pid: not state_of(pid), f"{victim.name} ends", self._within_s
            )
        return f"{names(victims)}: pid gone"

    async def heal(self) -> None:
        """The supervisor does."""


class Pause:
    """SIGSTOP; heals with SIGCONT."""

    def __init__(self, target: str, *, everyone: bool = False) -> None:
        self._target = target
        self._everyone = everyone
        self._victims: list[Victim] = []

    async def inject(self, field: Field) -> str:
        self._victims = await choose(field, self._target, everyone=self._everyone)
        for victim in self._victims:
            send(victim, signal.SIGSTOP)
        for victim in self._victims:
            await seen(lambda pid=victim.pid: state_of(pid) == "T", f"{victim.name} stops")
        return f"{names(self._victims)}: state T"

    async def heal(self) -> None:
        for victim in self._victims:
            send(victim, signal.SIGCONT)


class Both:
    """Two faults at once."""

    def __init__(self, first: Fault, second: Fault, apart_s: float = 0.0) -> None:
        self._faults = (first, second)
        self._apart_s = apart_s

    async def inject(self, field: Field) -> str:
        first = await self._faults[0].inject(field)
        await asyncio.sleep(self._apart_s)
        return f"{first}; {await self._faults[1].inject(field)}"

    async def heal(self) -> None:
        for fault in self._faults:
            await fault.heal()


async def choose(field: Field, target: str, *, everyone: bool) -> list[Victim]:
    """One of the processes that `target` means, or all of them."""
    victims = await field.site.victims(target)
    if not victims:
        raise NotInjected(f"no process is a {target}")
    return victims if everyone else [field.rng.choice(victims)]


def send(victim: Victim, number: signal.Signals) -> None:
    """Signal it, if it is still there; SIGTERM goes to a service alone, as from its supervisor."""
    try:
        if victim.group and number != signal.SIGTERM:
            os.killpg(victim.pid, number)
        else:
            os.kill(victim.pid, number)
    except ProcessLookupError:
        return


async def seen(holds: Callable[[], bool], what: str, within_s: float = PROOF_S) -> None:
    """Wait for the proof; raises `NotInjected`."""
    deadline = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > deadline:
            raise NotInjected(f"not seen within {within_s:g} s: {what}")
        await asyncio.sleep(POLL_S / 5)


async def proven(look: Callable[[], Awaitable[str]], what: str, within_s: float = PROOF_S) -> str:
    """As `seen`, where looking takes its time: until there is a proof, which it returns."""
    deadline = time.monotonic() + within_s
    while not (proof := await look()):
        if time.monotonic() > deadline:
            raise NotInjected(f"not seen within {within_s:g} s: {what}")
    return proof


def names(victims: list[Victim]) -> str:
    return ", ".join(victim.name for victim in victims)
