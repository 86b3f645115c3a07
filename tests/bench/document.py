"""`docs/benchmarks.md`, written by the run whose numbers it has."""

import datetime
from pathlib import Path

from tests.bench import report
from tests.bench.machine import described
from tests.bench.report import Results
from tests.tables import markdown

FOLDER = Path(__file__).parent


def page(results: Results, now: datetime.datetime) -> str:
    """The whole page."""
    parts = [
        (FOLDER / "benchmarks.md").read_text(),
        _what_ran(results, now),
        report.conditions(results),
    ]
    for workload in results.workloads:
        parts += [f"\n## {workload.title}\n", report.table(results, workload)]
    if results.profiles:
        parts += [
            "\n" + (FOLDER / "profile.md").read_text(),
            report.profile_table(results.profiles),
        ]
    return "\n".join(parts) + "\n"


def _what_ran(results: Results, now: datetime.datetime) -> str:
    servers = [[s.name, s.version, f"`{s.how}`"] for s in results.servers]
    return "\n".join(
        [
            f"**Run** of {now:%Y-%m-%d %H:%M} UTC, on {described()}.\n",
            markdown(["server", "version", "started as"], servers) + "\n",
        ]
    )
