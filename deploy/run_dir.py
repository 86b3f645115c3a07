"""The run directory of one cluster: its lock, its secrets, its logs; only the logs outlive it."""

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from deploy.errors import ClusterError

MIN_FREE_BYTES = 64 << 20  # logs, JetStream's first files and the launch files
OWN = ("launch", "servers", "public.json", "control.sock")
"""All that a cluster writes beside `logs`; nothing else in the directory is ever touched."""


class RunDir:
    """Held by one supervisor at a time, through a lock that dies with its holder.

    The lock is on the directory itself, so no lock file is left over. The supervisor and its
    reaper hold it together: a free lock means that all is swept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._fd: int | None = None

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def servers(self) -> Path:
        return self.path / "servers"

    def log_file(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Take the directory and sweep it; raises `ClusterError`. Sweeps again at the end."""
        self._acquire()
        reaper = Reaper(self)
        try:
            yield
        finally:
            self.sweep()
            self._unlock()
            reaper.dismiss()

    def _acquire(self) -> None:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.path.chmod(0o700)
            self._lock()
            self.sweep()
            for folder in (self.logs, self.path / "launch", self.servers):
                folder.mkdir(mode=0o700, exist_ok=True)
            free = shutil.disk_usage(self.path).free
        except OSError as error:
            self._unlock()
            raise disk_error(self.path, error) from error
        if free < MIN_FREE_BYTES:
            self._unlock()
            raise ClusterError(
                f"The disk of {self.path} is full: {free >> 20} MB free,"
                f" {MIN_FREE_BYTES >> 20} MB needed."
            )

    def _lock(self) -> None:
        self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            self._fd = None
            raise ClusterError(
                f"A mesh is already up in {self.path}; stop it with"
                f" `shoal down --run-dir {self.path}` or choose another --run-dir."
            ) from None

    def is_free(self, within_s: float = 0.0) -> bool:
        """True when no supervisor or reaper holds the directory, at the latest after `within_s`."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                return True
            except OSError as error:
                raise disk_error(self.path, error) from error
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    return False
            else:
                return True
            finally:
                os.close(fd)
            time.sleep(0.02)

    def sweep(self) -> None:
        """Remove all that is ours but the logs."""
        for name in OWN:
            path = self.path / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def _unlock(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def write_launch(self, name: str, content: Any) -> Path:
        """What a process is told, credentials included."""
        return self._write(self.path / "launch" / f"{name}.json", content)

    def write_public(self, content: Any) -> Path:
        """What other systems on this machine need to speak with the mesh over NATS."""
        return self._write(self.path / "public.json", content)

    def _write(self, path: Path, content: Any) -> Path:
        """`content` as JSON, readable by the user alone, never half written."""
        draft = path.with_suffix(".new")
        try:
            draft.unlink(missing_ok=True)
            with os.fdopen(
                os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"
            ) as file:
                file.write(msgspec.json.format(msgspec.json.encode(content)) + b"\n")
            draft.replace(path)
        except OSError as error:
            raise disk_error(path, error) from error
        return path


def disk_error(path: Path, error: OSError) -> ClusterError:
    """`error` as a sentence for the person at the terminal."""
    if error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return ClusterError(f"The disk of {path} is full.")
    return ClusterError(f"Cannot use {path}: {error.strerror or error}.")


class Reaper:
    """A forked child that waits for the supervisor's end and sweeps what a kill -9 left.

    The children die by themselves (`deploy.child`); files cannot.
    """

    def __init__(self, run_dir: RunDir) -> None:
        watch, self._alive = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _reap(run_dir, watch)
        os.close(watch)

    def dismiss(self) -> None:
        """The supervisor has swept by itself; returns when the reaper is gone."""
        os.close(self._alive)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)


def _reap(run_dir: RunDir, watch: int) -> None:
    """In the fork: hold nothing but the lock and the pipe, wait for the pipe to close, sweep."""
    try:
        os.setsid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        lock = run_dir._fd
        nothing = os.open(os.devnull, os.O_RDWR)
        for fd in (int(name) for name in os.listdir("/proc/self/fd")):  # noqa: PTH208 names are numbers
            if fd not in {watch, lock, nothing}:
                with contextlib.suppress(OSError):
                    os.dup2(nothing, fd) if fd < 3 else os.close(fd)
        os.read(watch, 1)
        run_dir.sweep()
    finally:
        os._exit(0)
