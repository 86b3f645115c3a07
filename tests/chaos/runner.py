"""Rounds: streams under way, a fault, its end, all requests ended, the mesh at rest, a verdict."""

import asyncio
import random
import secrets
import time
from collections import Counter
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.chaos.asks import BEGINS_LATE, Ask, conversations, mixed, salted, stored, streams
from tests.chaos.checker import Calm, Verdict, answers, check, ids_at_fault
from tests.chaos.history import AtRest, Healed, History, Injected
from tests.chaos.nemesis import Field, NotInjected
from tests.chaos.site import Held, Site
from tests.chaos.table import Experiment
from tests.chaos.workload import Clients, Lookups

LANES = 4  # of mixed requests beside the streams, one after the other
LEAVES = 0.2  # share of mixed requests whose client leaves
LOOKUPS = 32  # at once in the calm; more than kv_tier has connections
SPREAD_S = 0.8  # where in the streams the fault comes
REST_S = 30.0
SLEPT_S = 0.5  # half of the silence after which the mesh takes somebody for lost


class Load(NamedTuple):
    """How much is asked."""

    streams: int = 16
    tokens: int = 250  # of each: five seconds, longer than any promised wait
    stored: int = 5  # requests that outlive their gateways, as long as the streams
    mixed: int = 33  # different requests that the lanes choose from
    patience_s: float = 60.0  # for any request to end
    prefill_ids: int = 0  # of the prompt by which the calm run measures what a lost id costs


FULL = Load()
REAL_MODEL = Load(tokens=120, mixed=11, patience_s=300.0, prefill_ids=1000)


class Asks(NamedTuple):
    """What one round asks."""

    long: list[Ask]  # under way when the fault comes
    mixed: list[Ask]  # beside them, one after the other


class Round(NamedTuple):
    """One fault, once."""

    experiment: Experiment
    number: int
    history: Path
    verdict: Verdict
    redrives: Counter[str]  # by cause
    seconds: float
    slept_s: float  # the longest that our own loop, and so both proxies, stood still
    recompute_s: float = 0.0  # what the ids of those that were re-driven take, one after the other

    @property
    def counts(self) -> bool:
        """A watcher that slept knows nothing but what is wrong whoever slept: a wrong answer."""
        wrong = len(self.verdict.violations) - self.verdict.count("silent", "leaked", "failed")
        return self.slept_s < SLEPT_S or wrong > 0


class Watch:
    """How late this process's own loop is: at worst, since it was entered."""

    TICK_S = 0.02

    def __init__(self) -> None:
        self.slept_s = 0.0
        self._task: asyncio.Task[None] | None = None

    async def _watch(self) -> None:
        while True:
            due = time.monotonic() + self.TICK_S
            await asyncio.sleep(self.TICK_S)
            self.slept_s = max(self.slept_s, time.monotonic() - due)

    def __enter__(self) -> "Watch":
        self._task = asyncio.create_task(self._watch())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._task is not None
        self._task.cancel()


class Campaign:
    """Rounds on one site, after a calm run that says what is right and what a rest looks like."""

    def __init__(
        self, site: Site, seed: int, folder: Path, load: Load = FULL, *, keep: bool = False
    ) -> None:
        """`keep`: histories of rounds without a violation, too."""
        self._keep = keep
        self.site = site
        self._seed = seed
        self._folder = folder
        self._patience_s = load.patience_s
        self._prefill_ids = load.prefill_ids
        self._id_s = 0.0  # to prefill one
        self._stored = stored(seed, load.stored, load.tokens)
        self._streams = streams(seed, load.streams, load.tokens)
        self._conversations = conversations(seed, load.streams, load.tokens)
        self._mixed = mixed(seed, load.mixed)
        self._calm: Calm = {}
        self._baseline: dict[str, Held] = {}
        folder.mkdir(parents=True, exist_ok=True)

    async def calm(self) -> Verdict:
        """Everything twice without a fault: the second answers must be those of the first."""
        path = self._folder / "calm.jsonl"
        path.unlink(missing_ok=True)
        with History(path) as history:
            clients = await self._clients(history)
            everyone = self._streams + self._conversations + self._stored
            for _ in range(2):
                await asyncio.gather(*map(clients.ask, everyone))
                await asyncio.gather(*map(clients.ask, self._mixed))
            await clients.close()
            if self._prefill_ids:
                self._id_s = await self._prefill_s() / self._prefill_ids
            await (await self._lookups(history)).burst(LOOKUPS)
            history.add(AtRest(leaks=await self.site.rest(None, REST_S)))
            self._calm = answers(history.lines)
            self._baseline = await self.site.held()
            return check(history.lines, self._calm)

    async def _prefill_s(self) -> float:
        """How long a prompt takes that nobody has seen."""
        ids = [random.randint(1000, 20000) for _ in range(self._prefill_ids)]
        body = {"model": self.site.mesh.model, "prompt": ids, "max_tokens": 1}
        started = time.monotonic()
        await self.site.mesh.post("/v1/completions", body)
        return time.monotonic() - started

    async def round(self, experiment: Experiment, number: int) -> Round:
        """One fault under load."""
        started = time.monotonic()
        rng = random.Random(f"{self._seed}/{experiment.name}/{number}")
        path = self._folder / f"{experiment.name}-{number}.jsonl".replace(" ", "_")
        path.unlink(missing_ok=True)
        asks = self._asks(experiment)
        before = await self.site.counters("gateway")
        with History(path) as history, Watch() as watch:
            clients = await self._clients(history)
            try:
                await self._under_load(
                    experiment,
                    Field(self.site, clients, [*asks.long, *asks.mixed], rng),
                    asks,
                    history,
                )
            finally:
                await clients.close()
            history.add(AtRest(leaks=await self.site.rest(self._baseline, REST_S)))
            verdict = check(history.lines, self._calm, experiment.allowed)
        after = await self.site.counters("gateway")
        redrives = Counter(
            {
                name.removeprefix("redrive_"): count - before[name]
                for name, count in after.items()
                if name.startswith("redrive_") and count > before[name]
            }
        )
        if not verdict.violations and not self._keep:
            path.unlink()
        seconds = time.monotonic() - started
        recompute_s = self._id_s * ids_at_fault(history.lines, self._calm) * redrives.total()
        return Round(
            experiment, number, path, verdict, redrives, seconds, watch.slept_s, recompute_s
        )

    def _asks(self, experiment: Experiment) -> Asks:
        """For an experiment on L2 no worker holds anything of them, whatever it did before."""
        if not experiment.cold:
            return Asks(self._streams + self._stored, self._mixed)
        salt = secrets.token_hex(8)
        return Asks(salted(self._conversations + self._stored, salt), salted(self._mixed, salt))

    async def _under_load(
        self, experiment: Experiment, field: Field, asks: Asks, history: History
    ) -> None:
        over = asyncio.Event()
        load = [asyncio.create_task(field.clients.ask(ask)) for ask in asks.long]
        load += [asyncio.create_task(self._lane(field, asks.mixed, over)) for _ in range(LANES)]
        if experiment.lookups:
            lookups = await self._lookups(history)
            load.append(asyncio.create_task(lookups.run(over)))
        fault = experiment.make()
        try:
            begin = {ask.key for ask in asks.long if ask.way not in BEGINS_LATE}
            await field.clients.wait_begun(begin, self._patience_s)
            await asyncio.sleep(field.rng.uniform(0, SPREAD_S))
            at = time.monotonic()
            proof = await fault.inject(field)
            history.add(
                Injected(at=at, fault=experiment.fault, target=experiment.target, proof=proof)
            )
            await asyncio.sleep(experiment.hold_s)
        except (NotInjected, TimeoutError) as error:  # the latter: the streams never got under way
            history.add(Healed(fault=f"never there: {str(error) or 'no load'}"))
        finally:
            await fault.heal()
            history.add(Healed(fault=experiment.fault))
            over.set()
            await asyncio.gather(*load)

    async def _lane(self, field: Field, mixed: list[Ask], over: asyncio.Event) -> None:
        """One request after the other, also just after the fault; some clients leave early."""
        rng = random.Random(field.rng.random())
        while not over.is_set():
            ask = rng.choice(mixed)
            leaves = ask.way not in BEGINS_LATE and rng.random() < LEAVES
            await field.clients.ask(ask, leave_after=rng.randint(1, 12) if leaves else None)
        await field.clients.ask(rng.choice(mixed))

    async def _lookups(self, history: History) -> Lookups:
        [kv_tier] = await self.site.instances("kv_tier")
        return Lookups(self.site.bus, kv_tier, history)

    async def _clients(self, history: History) -> Clients:
        mesh = self.site.mesh
        bus = await self.site.outsider()
        return Clients(mesh.base_url, mesh.model, bus, history, self._patience_s)


def unhealthy(verdict: Verdict) -> bool:
    """Whether the next round needs a fresh cluster."""
    return bool(verdict.count("leaked", "silent"))
