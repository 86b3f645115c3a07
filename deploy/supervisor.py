"""The supervisor process: it owns the run directory, the listening socket and all children."""

import asyncio
import errno
import os
import socket
from pathlib import Path

from deploy.cluster import Cluster
from deploy.config import ClusterConfig, ClusterTable
from deploy.errors import ClusterError
from deploy.model import Model, resolve
from deploy.progress import Pipe, Progress, Refused, Stage, Terminal
from deploy.run_dir import RunDir
from shared.log import configure

NEXT_PORTS = 20  # tried after the default one
BACKLOG = 1024  # connections that wait while a gateway is restarted


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


def _log_to(log: Path) -> None:
    """Send our own standard output and error to `log`."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    configure("supervisor", f"supervisor-{os.getpid()}")
