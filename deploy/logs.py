"""The log of each process: bounded, and shown on the terminal."""

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deploy.errors import ClusterError

BYTES_MAX = 16 << 20  # of one log; the one before it is kept beside it as NAME.log.1
TAIL_LINES = 20
FOLLOW_S = 0.2


def cap(log: Path) -> None:
    """Keep `log` below its limit. Its process appends to the same file, so it is copied and cut;
    lines written in between are lost.
    """
    try:
        if log.stat().st_size > BYTES_MAX:
            shutil.copyfile(log, log.with_suffix(".log.1"))
            os.truncate(log, 0)
    except OSError:  # full disk: the copy is a luxury, the limit is not
        if log.exists():
            os.truncate(log, 0)


def tail(log: Path, lines: int) -> list[bytes]:
    """The last `lines` lines of `log`."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - lines * 4096))
            return file.read().splitlines()[-lines:]
    except FileNotFoundError:
        return []


def last_line(log: Path) -> str:
    """What `log` ends with, for a sentence on why its process cannot run."""
    for line in reversed(tail(log, TAIL_LINES)):
        if line.strip():
            return line.decode(errors="replace").strip()
    return f"it wrote nothing to {log}"


def find(folder: Path, name: str) -> list[Path]:
    """The logs in `folder`, or the one of `name`; raises `ClusterError`."""
    logs = sorted(folder.glob("*.log"))
    chosen = [log for log in logs if log.stem == name] if name else logs
    if not chosen:
        have = ", ".join(log.stem for log in logs) or "none"
        what = f"of {name!r} " if name else ""
        raise ClusterError(f"There is no log {what}in {folder}; there are: {have}.")
    return chosen


def show(logs: list[Path], lines: int, follow: bool) -> None:
    """Write the end of each log, and then, with `follow`, what is added, until Ctrl-C."""
    offsets = {}
    for log in logs:
        offsets[log] = log.stat().st_size
        _write(log, len(logs) > 1, tail(log, lines))
    while follow:
        time.sleep(FOLLOW_S)
        for log in logs:
            _write(log, len(logs) > 1, _added(log, offsets))


def _added(log: Path, offsets: dict[Path, int]) -> Iterator[bytes]:
    """Whole lines added since `offsets[log]`, which moves on."""
    with log.open("rb") as file:
        if file.seek(0, os.SEEK_END) < offsets[log]:  # it was cut
            offsets[log] = 0
        file.seek(offsets[log])
        for line in file:
            if not line.endswith(b"\n"):
                return
            offsets[log] += len(line)
            yield line.rstrip(b"\n")


def _write(log: Path, named: bool, lines: "list[bytes] | Iterator[bytes]") -> None:
    prefix = f"{log.stem:<15} " if named else ""
    for line in lines:
        sys.stdout.write(f"{prefix}{line.decode(errors='replace')}\n")
    sys.stdout.flush()
