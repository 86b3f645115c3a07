"""The supervisor process: it owns the run directory, the listening socket and all children."""

import asyncio
import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from deploy import control
from deploy.cluster import Cluster
from deploy.config import ClusterConfig, ClusterTable
from deploy.errors import ClusterError
from deploy.model import Model, resolve
from deploy.progress import Pipe, Progress, Ready, Refused, Stage, Terminal
from deploy.run_dir import RunDir
from shared.log import configure

NEXT_PORTS = 20  # tried after the default one
BACKLOG = 1024  # connections that wait while a gateway is restarted
END_S = 30.0  # for a supervisor to go down before it is killed


def supervise(config: ClusterConfig, model: Model, run_dir: RunDir, progress: Progress) -> None:
    """Run a cluster in `run_dir`, which is held, until told to stop; raises `ClusterError`."""
    with listen(config.cluster, config.port_is_asked) as listener:
        size = f"{model.bytes_on_disk / 1e6:.0f} MB"
        progress.tell(Stage("model", f"{model.name}, {size}, {model.path}"))
        cluster = Cluster(config, model, run_dir, listener, progress)
        asyncio.run(cluster.run())


def foreground(config: ClusterConfig, run_dir: RunDir) -> None:
    """Run a cluster in this terminal until Ctrl-C; raises `ClusterError`."""
    model = resolve(config.cluster.model)
    with run_dir.held():
        configure("supervisor", f"supervisor-{os.getpid()}")
        supervise(config, model, run_dir, Terminal())


def background(config: ClusterConfig, run_dir: RunDir, report_fd: int) -> int:
    """The detached supervisor: progress goes to `report_fd`, all else to its log."""
    pipe = Pipe(report_fd)
    try:
        model = resolve(config.cluster.model)
        with run_dir.held():
            _log_to(run_dir.log_file("supervisor"))
            supervise(config, model, run_dir, pipe)
    except ClusterError as error:
        pipe.tell(Refused(str(error)))
        return 1
    return 0


def listen(table: ClusterTable, port_is_asked: bool) -> socket.socket:
    """The socket that gateways inherit. A taken default port is stepped over, one that the user
    asked for is not; raises `ClusterError`.
    """
    family = socket.AF_INET6 if ":" in table.host else socket.AF_INET
    tries = [table.port] if port_is_asked else range(table.port, table.port + NEXT_PORTS)
    for port in tries:
        try:
            return socket.create_server((table.host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or error
                raise ClusterError(f"Cannot listen on {table.host}:{port}: {reason}.") from error
    raise ClusterError(
        f"Port {tries[0]} of {table.host} is taken; choose another with --port (0 = any free one)."
        if port_is_asked
        else f"Ports {tries[0]} to {tries[-1]} of {table.host} are taken; choose one with --port."
    )


def detached(run_dir: RunDir, arguments: list[str]) -> Ready:
    """Start a supervisor in the background, show how it comes up, leave it running.

    Raises `ClusterError`, and passes on Ctrl-C: then nothing of it is left.
    """
    ours, theirs = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "supervise", "--report-fd", str(theirs), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(theirs,),
        start_new_session=True,
    )
    os.close(theirs)
    terminal = Terminal()
    try:
        with os.fdopen(ours, "rb") as events:
            for line in events:
                event = Pipe.read(line)
                terminal.tell(event)
                match event:
                    case Refused():
                        process.wait()
                        raise ClusterError(event.reason)
                    case Ready():
                        return event
    except KeyboardInterrupt:
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    log = run_dir.log_file("supervisor")
    raise ClusterError(f"The supervisor ended (exit {process.wait()}); see {log}.")


def _log_to(log: Path) -> None:
    """Send our own standard output and error to `log`."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    configure("supervisor", f"supervisor-{os.getpid()}")


def down(run_dir: RunDir) -> bool:
    """Stop the cluster of `run_dir` and sweep what a killed one left; False = none was up."""
    was_up = True
    patience_s = END_S
    try:
        patience_s += control.status(run_dir.path).drain_s
        control.ask(run_dir.path, "down")
    except control.NotUp:
        was_up = False
    except control.Unresponsive as error:
        _kill(error.pid)  # its children die with it
    if not run_dir.is_free(patience_s):
        raise ClusterError(f"The supervisor of {run_dir.path} does not end; see {run_dir.logs}.")
    run_dir.sweep()
    return was_up


def _kill(pid: int) -> None:
    if pid:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def as_json(status: control.ClusterStatus) -> str:
    """For programs."""
    return msgspec.json.format(msgspec.json.encode(status)).decode()


def as_table(status: control.ClusterStatus) -> str:
    """For people."""
    rows = [("NAME", "STATE", "PID", "LOAD", "RESTARTS", "UPTIME", "DETAIL")]
    for p in status.processes:
        uptime = f"{p.uptime_s:.0f} s" if p.pid else ""
        pid = str(p.pid) if p.pid else ""
        rows.append((p.name, p.state, pid, str(p.load), str(p.restarts), uptime, p.detail))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    head = f"{status.model} at http://{status.host}:{status.port}/v1, {status.state}"
    return "\n".join([head, *lines])
