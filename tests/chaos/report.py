"""What rounds add up to: one row per fault and target."""

import math
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from tests.chaos.checker import Verdict
from tests.chaos.runner import Round
from tests.chaos.table import Experiment
from tests.tables import markdown

DIFFERENT = ("different", "foreign", "skipped", "truncated", "finish", "usage", "uncompared",
             "unrefused", "after_end", "stray")  # fmt: skip
RECOMPUTE_FACTOR = 1.3
HEAD = (
    "fault", "target", "rounds", "requests", "lost", "duplicated", "different", "failed",
    "untyped", "silent", "leaked", "re-drives", "gap p50", "p99", "max (n)", "first", "",
)  # fmt: skip


class Row(NamedTuple):
    """All rounds of one experiment."""

    experiment: Experiment
    rounds: list[Round]

    @property
    def verdicts(self) -> list[Verdict]:
        return [one.verdict for one in self.rounds]

    @property
    def gaps_s(self) -> list[float]:
        return sorted(gap for verdict in self.verdicts for gap in verdict.gaps_s)

    def count(self, *rules: str) -> int:
        return sum(verdict.count(*rules) for verdict in self.verdicts)

    def ends(self) -> Counter[str]:
        return sum((verdict.ends for verdict in self.verdicts), Counter())

    @property
    def too_slow(self) -> bool:
        """Whether the promised gap was missed; to compute again what was lost is not in it."""
        bound = self.experiment.gap_p99_s
        if bound is None or not self.gaps_s:
            return False
        recompute_s = max(one.recompute_s for one in self.rounds)
        return quantile(self.gaps_s, 0.99) > bound + RECOMPUTE_FACTOR * recompute_s

    @property
    def moved(self) -> bool:
        """Whether a stream was driven again where none that runs may be: one that waits goes to a
        new leader, or is sent once more.
        """
        return self.experiment.still and any(
            one.redrives.keys() - {"leader", "resend"} for one in self.rounds
        )

    @property
    def failed(self) -> bool:
        return self.word() != "ok"

    def cells(self) -> tuple[str, ...]:
        gaps, ends = self.gaps_s, self.ends()
        return (
            self.experiment.fault,
            self.experiment.target,
            str(len(self.rounds)),
            str(sum(verdict.requests for verdict in self.verdicts)),
            str(self.count("lost")),
            str(self.count("duplicated", "repeated", "two_results")),
            str(self.count(*DIFFERENT)),
            str(ends["failed"] - self.count("untyped")),
            str(ends["cut"] + self.count("untyped")),
            str(self.count("silent")),
            str(self.count("leaked")),
            str(sum(one.redrives.total() for one in self.rounds)),
            shown(gaps, 0.5),
            shown(gaps, 0.99),
            f"{shown(gaps, 1.0)} ({len(gaps)})",
            shown(sorted(first for verdict in self.verdicts for first in verdict.firsts_s), 1.0),
            self.word(),
        )

    def word(self) -> str:
        if self.count("not_injected"):
            return "NOT INJECTED"
        if any(verdict.violations for verdict in self.verdicts):
            return "FAILED"
        if self.moved:
            return "MOVED"
        return "SLOW" if self.too_slow else "ok"


def rows(rounds: Iterable[Round]) -> list[Row]:
    """By experiment, in the order in which they ran first."""
    by_name: dict[str, Row] = {}
    for one in rounds:
        row = by_name.setdefault(one.experiment.name, Row(one.experiment, []))
        row.rounds.append(one)
    return list(by_name.values())


def quantile(ordered: list[float], share: float) -> float:
    """The smallest value that `share` of all do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def shown(gaps_s: list[float], share: float) -> str:
    """Seconds, or a dash when no stream was under way."""
    return f"{quantile(gaps_s, share):.2f}" if gaps_s else "-"


def shown_as_table(table: list[Row]) -> str:
    """Of all rows."""
    return markdown(HEAD, (row.cells() for row in table))


def violations(one: Round, most: int = 5) -> list[str]:
    """The first few violations of a round, a line each, and where its history lies."""
    found = one.verdict.violations
    lines = [f"  {v.rule}: {v.request} {v.detail}".rstrip() for v in found[:most]]
    if len(found) > most:
        lines.append(f"  … and {len(found) - most} more")
    return [*lines, f"  history: {one.history}"] if found else []


def document(table: list[Row], seed: int, engine: str, minutes: float) -> str:
    """docs/chaos.md."""
    requests = sum(verdict.requests for row in table for verdict in row.verdicts)
    text = (Path(__file__).parent / "chaos.md").read_text()
    return text.format(
        seed=seed,
        engine=engine,
        minutes=f"{minutes:.0f}",
        requests=f"{requests:,}",
        rounds=sum(len(row.rounds) for row in table),
        cpus=os.cpu_count(),
        load=f"{os.getloadavg()[2]:.0f}",
        table=shown_as_table(table),
    )
