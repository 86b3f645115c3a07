"""The servers of a run: a mesh of our own, or one that runs, and peers by URL or command."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy import control
from deploy.servers import free_port
from tests.mesh.cluster import Mesh

READY_TIMEOUT_S = 900.0  # a peer may compile first
STOP_TIMEOUT_S = 15.0
POLL_S = 0.25
LOG_BYTES = 2000


class ServerFailed(Exception):
    """A server did not come up; the text says which and shows its last words."""


@dataclass(frozen=True)
class Server:
    """Something that speaks OpenAI's API."""

    name: str
    base_url: str
    model: str
    version: str
    how: str  # it was started
    roots: tuple[int, ...] = ()  # its processes are these and their children; () = not known
    run_dir: Path | None = None  # of a mesh


def parse_peers(text: str) -> list[tuple[str, str]]:
    """`name=URL; name=COMMAND` as pairs; raises `ValueError` that shows what is wrong."""
    peers = []
    for part in filter(None, map(str.strip, text.split(";"))):
        name, equals, what = part.partition("=")
        if not (equals and name.strip() and what.strip()):
            raise ValueError(f"PEERS: {part!r} is not NAME=URL or NAME=COMMAND")
        if not what.strip().startswith("http") and "{port}" not in what:
            raise ValueError(f"PEERS: the command of {name!r} does not say where {{port}} goes")
        peers.append((name.strip(), what.strip()))
    names = [name for name, _ in peers]
    if len(set(names)) < len(names) or "shoal" in names:
        raise ValueError(f"PEERS: names must differ, and none is 'shoal': {names}")
    return peers


@contextlib.contextmanager
def own_mesh(folder: Path, options: list[str]) -> Iterator[Server]:
    """A mesh with default settings but for `options` of `shoal up`."""
    with Mesh(folder, *options) as mesh:
        supervisor = control.status(folder).supervisor_pid
        how = " ".join(["shoal up", *options])
        yield Server("shoal", mesh.base_url, mesh.model, _git(), how, (supervisor,), folder)


@contextlib.contextmanager
def peer(name: str, what: str, folder: Path) -> Iterator[Server]:
    """A server at a URL, or one that `what` starts; stopped while others are measured."""
    if what.startswith("http"):
        url = what.rstrip("/").removesuffix("/v1")
        yield described_at(name, url, url)
        return
    port = free_port()
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            shlex.split(what.replace("{port}", str(port))),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # one group, to be paused and ended as a whole
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(name, url, process, log)
        yield described_at(name, url, _without_folders(what), process.pid)
    finally:
        _end_group(process)


@contextlib.contextmanager
def only(server: Server, servers: list[Server]) -> Iterator[None]:
    """Peers that were started here stand still while `server` is measured."""
    paused = [one for one in servers if one is not server and one.roots and one.run_dir is None]
    for one in paused:
        os.killpg(one.roots[0], signal.SIGSTOP)
    try:
        yield
    finally:
        for one in paused:
            os.killpg(one.roots[0], signal.SIGCONT)


def get_text(url: str) -> str:
    """Raises `OSError`, also for a status that is not 200."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def described_at(name: str, url: str, how: str, *roots: int) -> Server:
    model = json.loads(get_text(f"{url}/v1/models"))["data"][0]["id"]
    return Server(name, url, model, _version(url), how, roots)


def _version(url: str) -> str:
    """As vLLM and llama.cpp tell it."""
    for path, key in (("/version", "version"), ("/props", "build_info")):
        with contextlib.suppress(OSError, ValueError):
            told: dict[str, Any] = json.loads(get_text(url + path))
            if key in told:
                return str(told[key])
    return "-"


def _git() -> str:
    told = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return told.stdout.strip() or "-"


def _wait_ready(name: str, url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until it answers a request: some list their models before they can."""
    until = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        with contextlib.suppress(OSError, ValueError):
            model = json.loads(get_text(f"{url}/v1/models"))["data"][0]["id"]
            body = json.dumps({"model": model, "prompt": "Hello", "max_tokens": 1}).encode()
            asked = urllib.request.Request(
                f"{url}/v1/completions", body, {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=60):
                return
        time.sleep(POLL_S)
    words = log.read_bytes()[-LOG_BYTES:].decode(errors="replace")
    raise ServerFailed(f"{name} did not come up:\n{words}")


def _end_group(process: subprocess.Popen[bytes]) -> None:
    for kind in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, kind)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
            if kind == signal.SIGTERM:
                continue  # whatever of the group is left, too


def _without_folders(command: str) -> str:
    return re.sub(r"(?<=[ =])/\S*/|^/\S*/", "", command)
