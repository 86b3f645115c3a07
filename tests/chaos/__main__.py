"""`make chaos`, `shoal chaos`: break a mesh on purpose and compare every answer."""

import argparse
import asyncio
import logging
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import structlog
import uvloop

from tests.chaos import report
from tests.chaos.runner import FULL, REAL_MODEL, Campaign, Round, unhealthy
from tests.chaos.saturation import FULL_SOON, saturate
from tests.chaos.site import REAL, SIMULATED, Site
from tests.chaos.table import Experiment, main_rows, table

DOCUMENTS = {"sim": Path("docs/chaos.md"), "real": Path("docs/chaos-real.md")}
OPTIONS = {"sim": SIMULATED, "real": REAL}
SATURATE_MINUTES = 10.0
TRIES_MAX = 3  # of a round, when this process slept


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="shoal chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=None, help="replays a run")
    parser.add_argument("--fault", default="", metavar="TEXT", help="rows whose name contains this")
    parser.add_argument("--rounds", type=int, default=None, help="per row, instead of the table's")
    parser.add_argument("--random", action="store_true", help="rows by chance, for --minutes")
    parser.add_argument("--minutes", type=float, default=None, help="stop after so long")
    parser.add_argument(
        "--saturate", action="store_true", help="no fault but full load, for --minutes"
    )
    parser.add_argument("--engine", choices=OPTIONS, default="sim")
    parser.add_argument("--list", action="store_true", help="show the rows and end")
    parser.add_argument("--write", action="store_true", help="write docs/chaos*.md")
    parser.add_argument("--keep", action="store_true", help="histories of good rounds, too")
    parser.add_argument("--run-dir", type=Path, default=Path(".run/chaos"))
    return parser.parse_args(given)


def plan(
    args: argparse.Namespace, chosen: list[Experiment], seed: int
) -> Iterator[tuple[Experiment, int]]:
    """Which row, and which round of it."""
    if args.random:
        rng = random.Random(seed)
        number = 0
        while True:
            number += 1
            yield rng.choice(chosen), number
    for row in chosen:
        for number in range(1, (args.rounds or row.rounds) + 1):
            yield row, number


async def run(args: argparse.Namespace, chosen: list[Experiment], seed: int) -> list[Round]:
    """All rounds; a cluster that a fault left broken is replaced."""
    ends_at = time.monotonic() + args.minutes * 60 if args.minutes else float("inf")
    todo = plan(args, chosen, seed)
    done: list[Round] = []
    folder = args.run_dir.absolute() / "histories"
    while True:
        load = FULL if args.engine == "sim" else REAL_MODEL
        async with Site(args.run_dir.absolute() / "mesh", *OPTIONS[args.engine]) as site:
            campaign = Campaign(site, seed, folder, load, keep=args.keep)
            calm = await campaign.calm()
            print(f"calm: {calm.requests} requests, {len(calm.violations)} violations", flush=True)
            if calm.violations:
                sys.exit("\n".join(map(str, calm.violations[:10])))
            for experiment, number in todo:
                if time.monotonic() > ends_at:
                    return done
                one = await counted(campaign, experiment, number)
                done.append(one)
                if unhealthy(one.verdict):
                    print("a fresh cluster follows", flush=True)
                    break
            else:
                return done


async def counted(campaign: Campaign, experiment: Experiment, number: int) -> Round:
    """A round through which this process was awake; the last one, if it never was."""
    for _ in range(TRIES_MAX):
        one = await campaign.round(experiment, number)
        tell(one)
        if one.counts:
            break
    return one


def tell(one: Round) -> None:
    """A line per round, and what was wrong."""
    verdict = one.verdict
    gap = f"gap max {max(verdict.gaps_s):.2f} s of {len(verdict.gaps_s)}" if verdict.gaps_s else ""
    causes = ", ".join(f"{count} {cause}" for cause, count in one.redrives.items()) or "none"
    ends = ", ".join(f"{count} {how}" for how, count in sorted(verdict.ends.items()))
    print(
        f"{one.experiment.name} {one.number}: {ends}; re-drives: {causes}; {gap};"
        f" {one.seconds:.0f} s",
        *([] if one.counts else [f"  not counted: this process slept {one.slept_s:.1f} s"]),
        *report.violations(one),
        sep="\n",
        flush=True,
    )


def main() -> int:
    """Exit 1 when a promise was broken."""
    args = arguments()
    rows_of = {"sim": table, "real": main_rows}[args.engine]
    chosen = [row for row in rows_of() if args.fault in row.name]
    if args.list:
        print(*(row.name for row in chosen), sep="\n")
        return 0
    if not chosen:
        sys.exit(f"No row contains {args.fault!r}; --list shows them.")
    seed = random.SystemRandom().getrandbits(31) if args.seed is None else args.seed
    print(f"SEED={seed}", flush=True)
    # Of our own connections to the bus: that they break is what was asked for.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    started = time.monotonic()
    if args.saturate:
        site = Site(args.run_dir.absolute() / "mesh", *OPTIONS[args.engine], *FULL_SOON)
        return int(not asyncio.run(saturate(site, args.minutes or SATURATE_MINUTES, seed)))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rounds = runner.run(run(args, chosen, seed))
    rows = report.rows(rounds)
    minutes = (time.monotonic() - started) / 60
    print(f"\n{report.shown_as_table(rows)}\n\nSEED={seed}, {minutes:.1f} minutes")
    if args.write:
        DOCUMENTS[args.engine].write_text(report.document(rows, seed, args.engine, minutes))
    return int(any(row.failed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
