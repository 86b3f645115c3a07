"""What is logged, and what logging may not do."""

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
from shared.log import configure, log
configure("gateway", "gateway-0-1")
log.warning("something")
print("goes on")
"""


def test_a_full_disk_stops_nobody_who_logs() -> None:
    """A line that cannot be written is lost; who wrote it goes on."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            stdout=subprocess.PIPE,
            stderr=full,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            text=True,
            timeout=60,
            check=False,
        )

    assert (done.returncode, done.stdout) == (0, "goes on\n")
