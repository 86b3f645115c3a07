"""What a run adds up to, as text that is also markdown."""

import math
import os
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.bench.machine import Probe
from tests.bench.profiling import Profile
from tests.bench.servers import Server
from tests.bench.stats import Spread, advantage, spread
from tests.bench.workloads import Metrics, Workload
from tests.tables import markdown

UNITS = {
    "tok_s": "output tok/s",
    "prompt_tok_s": "prompt tok/s",
    "requests_s": "requests/s",
    "calm_itl_p50_ms": "ITL p50 before, ms",
    "itl_p99_ms": "ITL p99, ms",
    "p99_by_calm_p50": "p99 ÷ p50 before",
    "cached_percent": "prompt found in a cache, %",
    "long_ttft_ms": "TTFT of the long one, ms",
}
MORE_IS_BETTER = {"tok_s", "prompt_tok_s", "requests_s"}
QUIET_CORES = 0.2  # of other work, in the median
NOT_COMPARED = {"cached_percent"}  # servers count it differently, or not at all


class Measured(NamedTuple):
    """One server in one round of one workload."""

    metrics: Metrics
    cores: Metrics  # who used the processors
    probe: Probe


@dataclass
class Results:
    """All that was measured: by workload and server, a list of rounds."""

    servers: list[Server]
    workloads: list[Workload]
    rounds: dict[tuple[str, str], list[Measured]] = field(default_factory=dict)
    failures: dict[tuple[str, str], str] = field(default_factory=dict)
    profiles: dict[str, list[Profile]] = field(default_factory=dict)

    def of(self, workload: str, server: str) -> list[Measured]:
        return self.rounds.setdefault((workload, server), [])

    def values(self, workload: str, server: str, metric: str) -> list[float]:
        return [one.metrics[metric] for one in self.of(workload, server)]

    @property
    def all(self) -> list[Measured]:
        return [one for rounds in self.rounds.values() for one in rounds]


def shown(value: float) -> str:
    """Three digits, no exponent."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def with_range(values: Spread) -> str:
    """Median (lowest to highest)."""
    return f"{shown(values.median)} ({shown(values.low)}-{shown(values.high)})"


def line(workload: Workload, server: str, measured: Measured) -> str:
    """One round while the run goes on."""
    probe, cores = measured.probe, measured.cores
    told = "  ".join(f"{unit(m)} {shown(measured.metrics[m])}" for m in workload.shown)
    return (
        f"{workload.name:<12} {server:<12} {told}  | round trip {probe.round_trip_ns} ns,"
        f" {probe.read_gb_s} GB/s, load {probe.load}, generator {cores['own']:.2f} cores,"
        f" others {shown(cores['others'])}"
    )


def unit(metric: str) -> str:
    """`ttft_p50_ms` as people write it."""
    if metric in UNITS:
        return UNITS[metric]
    name, _, rest = metric.partition("_")
    return f"{name.upper()} {rest.removesuffix('_ms')}, ms"


def table(results: Results, workload: Workload) -> str:
    """One row per server; peers' cells say in bold how many times better the first server is."""
    first, *_ = results.servers
    rows = []
    for server in results.servers:
        count = len(results.of(workload.name, server.name))
        names = (first.name, server.name)
        cells = [_cell(results, workload.name, names, metric) for metric in workload.shown]
        rows.append([server.name, str(count), *cells])
    notes = [
        f"\n{note}" for server in results.servers for note in _notes(results, workload, server)
    ]
    head = ["server", "rounds", *map(unit, workload.shown)]
    return "\n".join([markdown(head, rows), *notes])


def _notes(results: Results, workload: Workload, server: Server) -> Iterator[str]:
    """What a reader of the table must know."""
    key = workload.name, server.name
    if key in results.failures:
        yield f"{server.name}: {results.failures[key]}"
    ours = results.values(workload.name, results.servers[0].name, "prompt_tokens")
    theirs = results.values(workload.name, server.name, "prompt_tokens")
    if any(our != their for our, their in zip(ours, theirs, strict=False)):
        yield f"{server.name} counts {theirs[0]:,.0f} prompt tokens in a round, not {ours[0]:,.0f}."


def _cell(results: Results, workload: str, names: tuple[str, str], metric: str) -> str:
    first, server = names
    theirs = results.values(workload, server, metric)
    if not theirs:
        return "-"
    cell = with_range(spread(theirs))
    ours = results.values(workload, first, metric)
    if server == first or not ours or metric in NOT_COMPARED:
        return cell
    paired = min(len(ours), len(theirs))
    better = metric in MORE_IS_BETTER
    factor = advantage(ours[:paired], theirs[:paired], more_is_better=better)
    return f"{cell} **{factor.median:.2f}x**"


def conditions(results: Results) -> str:
    """What the machine was like meanwhile."""
    rows = []
    for what, values in {
        "core-to-core round trip, ns": [m.probe.round_trip_ns for m in results.all],
        "memory read bandwidth, both cores, GB/s": [m.probe.read_gb_s for m in results.all],
        "load average before": [m.probe.load for m in results.all],
        "load generator, cores": [f"{m.cores['own']:.3f}" for m in results.all],
        "all but it and the server measured, cores": [
            f"{m.cores['others']:.3f}" for m in results.all if not math.isnan(m.cores["others"])
        ],
    }.items():
        numbers = [float(value) for value in values if value != "-"]
        if numbers:
            low, high = min(numbers), max(numbers)
            rows.append([what, shown(statistics.median(numbers)), f"{shown(low)}-{shown(high)}"])
    return markdown(["before or during each measurement", "median", "range"], rows)


def warning(results: Results) -> str:
    """Nothing on a quiet machine."""
    others = [m.cores["others"] for m in results.all if not math.isnan(m.cores["others"])]
    if not others or statistics.median(others) < QUIET_CORES:
        return ""
    return (
        f"\n**This machine was not quiet**: other work took {shown(statistics.median(others))}"
        f" of its {os.cpu_count()} processors. Values are far from what it can do, and threads"
        " that wait for each other lose most; read the factors, with their spread, and measure"
        " again.\n"
    )


def profile_table(profiles: dict[str, list[Profile]]) -> str:
    """Our own processes: of each workload the round whose engine cost least per token."""
    chosen = {
        workload: min(rounds, key=lambda p: sum(p.processes_s.values()) / p.tokens)
        for workload, rounds in profiles.items()
    }
    names = list(dict.fromkeys(name for one in chosen.values() for name in one.processes_s))
    phases = list(dict.fromkeys(name for one in chosen.values() for name in one.phases_s))
    columns = list(chosen.values())

    def row(what: str, cells: Iterable[float]) -> list[str]:
        return [what, *map(shown, cells)]

    by_process = [row(name, [1e6 * p.processes_s.get(name, 0) / p.tokens for p in columns])
                  for name in names]  # fmt: skip
    rest = [sum(s for n, s in p.processes_s.items() if not n.endswith(" engine")) for p in columns]
    steps = [max(1, p.steps) for p in columns]
    rows = [
        *by_process,
        row("**all but engines, µs per token**",
            [1e6 * s / p.tokens for s, p in zip(rest, columns, strict=True)]),
        row("all but engines, µs per request",
            [1e6 * s / p.requests for s, p in zip(rest, columns, strict=True)]),
        row("all but engines, ms per step",
            [1e3 * s / n for s, n in zip(rest, steps, strict=True)]),
        row("engines, ms of CPU per step",
            [1e3 * (sum(p.processes_s.values()) - s) / n
             for p, s, n in zip(columns, rest, steps, strict=True)]),
        row("steps", [p.steps for p in columns]),
        row("wall ms per step", [1e3 * p.wall_s / n for p, n in zip(columns, steps, strict=True)]),
        *(row(f"phase {name}, wall ms per step",
              [1e3 * p.phases_s.get(name, 0) / n for p, n in zip(columns, steps, strict=True)])
          for name in phases),
    ]  # fmt: skip
    return markdown(["CPU µs per output token, or as said", *chosen], rows)
