"""Where the processor time of our mesh goes: by process, and inside the engine by phase."""

import re
import time
from typing import NamedTuple

from deploy import control
from tests.bench.machine import cpu_s, with_children
from tests.bench.servers import Server, get_text
from tests.bench.workloads import Metrics

SETTLED_S = 0.6  # the supervisor hears of a worker's last step within 250 ms
_PHASE = re.compile(
    r'^shoal:engine_phase_seconds_total\{[^}]*phase="([^"]+)"[^}]*\} (\S+)$', re.MULTILINE
)


class Seen(NamedTuple):
    """Totals at one moment: seconds by process and by phase of the engine, steps, time."""

    processes: dict[str, float]
    phases: dict[str, float]
    steps: int
    at_s: float


class Profile(NamedTuple):
    """What one round cost."""

    processes_s: dict[str, float]
    phases_s: dict[str, float]
    steps: int
    wall_s: float
    tokens: float
    requests: float


class Profiler:
    """Before and after a round of `server`, which is a mesh of ours."""

    def __init__(self, server: Server) -> None:
        assert server.run_dir is not None
        self._server = server
        self._run_dir = server.run_dir
        self._before = self._look()

    def read(self, metrics: Metrics) -> Profile:
        """What was spent since; `metrics` are the round's."""
        at_once = self._look()
        time.sleep(SETTLED_S)  # nothing runs, so that steps stand still when they have been told
        before, steps = self._before, self._look().steps
        return Profile(
            _grown(before.processes, at_once.processes),
            _grown(before.phases, at_once.phases),
            steps - before.steps,
            at_once.at_s - before.at_s,
            metrics["output_tokens"],
            metrics["requests"],
        )

    def _look(self) -> Seen:
        at_s = time.perf_counter()
        status = control.status(self._run_dir)
        used = {"supervisor": cpu_s(status.supervisor_pid)}
        steps = 0
        for process in status.processes:
            steps += int(process.extra.get("step", 0))
            used[process.name] = cpu_s(process.pid)
            children = sum(map(cpu_s, with_children([process.pid])[1:]))
            if process.name.startswith("gpu_worker"):
                used[f"{process.name} engine"] = children
            else:
                used[process.name] += children
        return Seen(used, phase_seconds(get_text(f"{self._server.base_url}/metrics")), steps, at_s)


def phase_seconds(text: str) -> dict[str, float]:
    """Seconds by phase, of all workers; empty when they do not tell."""
    phases: dict[str, float] = {}
    for phase, seconds in _PHASE.findall(text):
        phases[phase] = phases.get(phase, 0.0) + float(seconds)
    return phases


def _grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}
