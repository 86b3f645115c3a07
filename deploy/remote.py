"""A cluster from outside: start it in the background, take it down."""

import contextlib
import os
import signal
import subprocess
import sys

from deploy import control
from deploy.errors import ClusterError
from deploy.progress import Pipe, Ready, Refused, Terminal
from deploy.run_dir import RunDir

END_S = 30.0  # for a supervisor to go down, beside what running answers may take


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
