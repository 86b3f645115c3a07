"""`make bench`: Shoal beside its peers, in one run on the same requests.

In each round every workload is asked of every server, one server after the other, each round
beginning with another one. Peers that were started here stand still while another is measured.
"""

import argparse
import contextlib
import datetime
import math
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from tests.bench import document, report
from tests.bench.machine import Meter, Prober, described
from tests.bench.profiling import Profiler
from tests.bench.report import Measured, Results
from tests.bench.servers import Server, ServerFailed, only, own_mesh, parse_peers, peer
from tests.bench.stream import AskFailed
from tests.bench.workloads import CAPACITY, WORKLOADS, Shape, Task, Workload, closed

DOCUMENT = Path("docs/benchmarks.md")
WARM_UP = closed(8, 1, Shape(128, 32))


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    """The command line; what is wrong with it ends the process."""
    parser = argparse.ArgumentParser(prog="make bench", description=__doc__)
    names = [workload.name for workload in WORKLOADS]
    parser.add_argument("settings", nargs="*", metavar="SECTION.KEY=VALUE", help="of the mesh")
    parser.add_argument("--engine", choices=("real", "sim"), help="of the mesh")
    parser.add_argument("--base-url", help="measure what runs there instead of a mesh of its own")
    parser.add_argument("--peers", default="", help="NAME=URL or NAME=COMMAND with {port}; by ';'")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin nothing after")
    parser.add_argument("--only", default="", help=f"of {', '.join(names)}; by ','")
    parser.add_argument("--seed", default="1", help="of prompts and arrivals")
    parser.add_argument("--profile", action="store_true", help="where our own time goes")
    parser.add_argument("--write", action="store_true", help=f"write {DOCUMENT}")
    args = parser.parse_args(given)
    try:
        args.peers = parse_peers(args.peers)
        args.workloads = chosen(args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if args.base_url and (args.profile or args.settings or args.engine):
        parser.error("--profile, --engine and settings need a mesh of its own, not --base-url")
    return args


def chosen(names: str) -> list[Workload]:
    """Those named, in their order; all without a name. An open loop needs to know the capacity."""
    wanted = set(filter(None, names.split(",")))
    known = {workload.name for workload in WORKLOADS}
    if wanted - known:
        raise ValueError(f"--only: {sorted(wanted - known)} is not among {sorted(known)}")
    if "poisson" in wanted:
        wanted.add(CAPACITY)
    return [one for one in WORKLOADS if one.name in wanted or (not wanted and one.usual)]


@contextlib.contextmanager
def started(args: argparse.Namespace, folder: Path) -> Iterator[list[Server]]:
    """Our server and all peers."""
    options = [*(["--engine", args.engine] if args.engine else []), *args.settings]
    with contextlib.ExitStack() as stack:
        if args.base_url:
            servers = [stack.enter_context(peer("shoal", args.base_url, folder))]
        else:
            servers = [stack.enter_context(own_mesh(folder / "mesh", options))]
        for name, what in args.peers:
            with only(servers[0], servers):
                servers.append(stack.enter_context(peer(name, what, folder)))
        yield servers


class Run:
    """All rounds."""

    def __init__(self, args: argparse.Namespace, servers: list[Server], prober: Prober) -> None:
        self.results = Results(servers, args.workloads)
        self._args = args
        self._prober = prober

    async def all(self) -> None:
        """Warm up, then measure; prints as it goes."""
        until = time.monotonic() + 60 * self._args.minutes
        for server in self.results.servers:
            with only(server, self.results.servers):
                await WARM_UP(Task(server, f"{self._args.seed} warm", 0.0))
        for number in range(self._args.rounds):
            for workload in self.results.workloads:
                if time.monotonic() > until:
                    return
                for server in self._turns(number):
                    await self._measure(workload, server, number)

    def _turns(self, number: int) -> list[Server]:
        first = number % len(self.results.servers)
        return self.results.servers[first:] + self.results.servers[:first]

    async def _measure(self, workload: Workload, server: Server, number: int) -> None:
        """What fails is said once and not asked again."""
        key = workload.name, server.name
        if key in self.results.failures:
            return
        salt = f"{self._args.seed} {workload.name} {number}"
        capacity = max(self.results.values(CAPACITY, server.name, "tok_s"), default=0.0)
        profiled = self._args.profile and server.run_dir is not None
        with only(server, self.results.servers):
            probe = self._prober.measure()
            profiler = Profiler(server) if profiled else None
            meter = Meter(server.roots)
            try:
                metrics = await workload.run(Task(server, salt, capacity))
            except AskFailed as failed:
                self.results.failures[key] = str(failed)
                print(f"{workload.name:<12} {server.name:<12} failed: {failed}")
                return
            measured = Measured(metrics, meter.read(), probe)
            if profiler is not None:
                kept = self.results.profiles.setdefault(workload.name, [])
                kept.append(profiler.read(metrics))
        self.results.of(*key).append(measured)
        print(report.line(workload, server.name, measured), flush=True)


def main() -> None:
    """Measure, print, and write the page if asked to. Speed fails nothing here."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers are taken down, too
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as name:
        folder = Path(name)
        prober = Prober(folder)
        print(described(), flush=True)
        try:
            with started(args, folder) as servers:
                run = Run(args, servers, prober)
                uvloop.run(run.all())
        except ServerFailed as error:
            sys.exit(str(error))
    text = document.page(run.results, datetime.datetime.now(datetime.UTC))
    print(text)
    if args.write:
        DOCUMENT.write_text(text)


if __name__ == "__main__":
    main()
