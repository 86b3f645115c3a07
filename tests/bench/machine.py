"""The machine at this moment, since one machine is fast and slow within an hour."""

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PROBE = Path(__file__).with_name("probe.c")
PROBE_TIMEOUT_S = 30.0
COMPILE_TIMEOUT_S = 60.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TOLD_FLAGS = ("avx2", "avx512_vnni", "avx512_bf16", "amx_int8")  # that decide what a step costs


class Probe(NamedTuple):
    """Two processors' round trip and read bandwidth, as text; a dash where it was not measured."""

    round_trip_ns: str = "-"
    read_gb_s: str = "-"
    load: str = "-"


class Prober:
    """Compiles `probe.c` in `folder`; without a compiler or a second processor it measures less."""

    def __init__(self, folder: Path) -> None:
        self._program = folder / "probe"
        self._cpus = [str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2]]
        compiler = shutil.which("cc") or shutil.which("gcc")
        self._compiled = len(self._cpus) == 2 and compiler is not None and self._compile(compiler)

    def _compile(self, compiler: str) -> bool:
        options = ("-O3", "-march=native", "-pthread", "-o", self._program)
        compiled = subprocess.run(
            [compiler, *options, PROBE],
            capture_output=True,
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
        return compiled.returncode == 0

    def measure(self) -> Probe:
        """Takes half a second of both processors."""
        load = f"{os.getloadavg()[0]:.1f}"
        if not self._compiled:
            return Probe(load=load)
        try:
            told = subprocess.run(
                [self._program, *self._cpus],
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                check=True,
            )
        except (subprocess.SubprocessError, OSError):
            return Probe(load=load)
        round_trip_ns, read_gb_s = told.stdout.split()
        return Probe(round_trip_ns, read_gb_s, load)


def described() -> str:
    """The class of machine, without its name."""
    text = Path("/proc/cpuinfo").read_text()
    names = re.findall(r"^model name\s*: (.*)$", text, re.MULTILINE) or ["unknown processor"]
    flags = set(re.findall(r"^flags\s*: (.*)$", text, re.MULTILINE)[:1][0].split())
    has = ", ".join(flag for flag in TOLD_FLAGS if flag in flags)
    memory_gb = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    count = len(os.sched_getaffinity(0))
    return f"{count} x {names[0]} ({has or 'no wide instructions'}), {memory_gb:.0f} GB memory"


def busy_s() -> float:
    """Processor seconds that this machine has spent, or that its host took from it (steal)."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / TICKS_PER_S


def cpu_s(pid: int) -> float:
    """What all threads of `pid` have used; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def with_children(roots: Iterable[int]) -> list[int]:
    """`roots` and all that descend from them."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(roots)
    for pid in found:  # grows while it is read
        found += children.get(pid, [])
    return found


class Meter:
    """Who used the processors since it was made."""

    def __init__(self, roots: Iterable[int]) -> None:
        self._roots = tuple(roots)
        self.start = time.perf_counter()
        self._own = time.process_time()
        self._busy = busy_s()
        self._server = self._server_s()

    def _server_s(self) -> float:
        return sum(map(cpu_s, with_children(self._roots)))

    def read(self) -> dict[str, float]:
        """In cores: the server (NaN if its processes are not known), this process, all others."""
        wall = time.perf_counter() - self.start
        own = (time.process_time() - self._own) / wall
        busy = (busy_s() - self._busy) / wall
        server = (self._server_s() - self._server) / wall if self._roots else float("nan")
        return {"server": server, "own": own, "others": max(0.0, busy - own - server), "wall": wall}
