"""What counts as a leak of a mesh at rest, and what was done to processes."""

import signal
import subprocess
import sys

import pytest

from shared.testing import eventually
from tests.chaos.nemesis import send
from tests.chaos.site import Held, Victim, leaks, state_of

REST = Held(state="ready", load=0, blocks_used=0, tasks=9, files=20, slots=2, subscriptions=12)
BASELINE = {"gateway-0": REST, "gateway-1": REST._replace(tasks=11), "gpu_worker-0": REST}


def test_a_mesh_at_rest_holds_nothing_new() -> None:
    """Less is no leak, and either of two gateways may hold what one of them held before."""
    assert leaks(BASELINE, BASELINE) == ()
    assert leaks({"gateway-0": REST._replace(tasks=11, files=3)}, BASELINE) == ()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("state", "backoff"),
        ("load", 1),
        ("blocks_used", 3),
        ("tasks", 12),
        ("files", 21),
        ("slots", 3),
        ("subscriptions", 13),
    ],
)
def test_each_thing_held_is_a_leak(field: str, value: object) -> None:
    """The leak names the process, and how much."""
    [leak] = leaks({**BASELINE, "gateway-1": REST._replace(**{field: value})}, BASELINE)
    assert leak.startswith("gateway-1 ")
    assert str(value) in leak


async def test_a_stopped_and_an_ended_process_are_seen() -> None:
    """The proofs of a pause and of a kill; an ended process that nobody has reaped is gone."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        victim = Victim("sleeper", process.pid)
        send(victim, signal.SIGSTOP)
        await eventually(lambda: state_of(victim.pid) == "T")
        send(victim, signal.SIGCONT)
        await eventually(lambda: state_of(victim.pid) == "S")
        send(victim, signal.SIGKILL)
        await eventually(lambda: state_of(victim.pid) == "")
    send(victim, signal.SIGCONT)  # nobody is there any more
    assert state_of(victim.pid) == ""
