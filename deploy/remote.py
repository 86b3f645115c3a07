"""A cluster from outside: start it in the background, take it down."""

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

from deploy import control
from deploy.errors import ClusterError
from deploy.progress import Pipe, Ready, Refused, Terminal
from deploy.run_dir import RunDir

END_S = 30.0  # for a supervisor to go down, beside what running answers may take


def detached(run_dir: RunDir, arguments: list[str]) -> Ready:
    """Start a supervisor in the background, show how it comes up, leave it running.

    Raises `ClusterError`, and passes on Ctrl-C: then nothing of it is left. When nobody reads our
    output any more, only the showing ends.
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
    reason = f"The supervisor ended (exit {process.wait()}); see {log}."
    terminal.tell(Refused(reason))
    raise ClusterError(reason)


def down(run_dir: RunDir) -> bool:
    """Stop the cluster of `run_dir` and sweep what a killed one left; False = none was up."""
    was_up = True
    try:
        status = control.status(run_dir.path)
        with _watching(status.supervisor_pid) as ended:
            control.ask(run_dir.path, control.Command("down"))
            ended(END_S + status.drain_s)
    except control.NotUp:
        was_up = False
    except control.Unresponsive as error:
        if error.pid:
            with _watching(error.pid) as ended, contextlib.suppress(ProcessLookupError):
                os.kill(error.pid, signal.SIGKILL)  # its children die with it
                ended(END_S)
    if not run_dir.is_free(END_S):
        raise ClusterError(f"The supervisor of {run_dir.path} does not end; see {run_dir.logs}.")
    run_dir.sweep()
    return was_up


@contextlib.contextmanager
def _watching(pid: int) -> Iterator[Callable[[float], None]]:
    """Yields how to wait, at most so many seconds, for the end of the process that is `pid` now."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError as error:
        raise control.NotUp(f"Process {pid} has ended.") from error
    try:
        yield lambda seconds: _wait(pidfd, seconds)
    finally:
        os.close(pidfd)


def _wait(pidfd: int, seconds: float) -> None:
    select.select([pidfd], [], [], seconds)
