"""A whole cluster of its own for a test: free port, private run directory, gone afterwards."""

import asyncio
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp
import nats
import openai

from shared.nats_bus import NatsBus

START_S = 180.0


class Mesh:
    """A running cluster. Everything is done as a user does it: the command line and HTTP."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.run_dir = run_dir
        self.host = "127.0.0.1"
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        self.model = ""

    def shoal(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a `shoal` command against this cluster."""
        return subprocess.run(
            [sys.executable, "-m", "deploy.cli", *arguments, "--run-dir", str(self.run_dir)],
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )

    def start(self) -> None:
        """Bring the cluster up; returns when it can serve."""
        started = self.shoal("up", "--port", "0", "--no-sample", *self._options)
        assert started.returncode == 0, started.stdout + started.stderr + self.logs()
        status = self.status()
        self.port = int(status["port"])
        self.model = status["model"]

    def stop(self) -> None:
        """Take the cluster down."""
        stopped = self.shoal("down")
        assert stopped.returncode == 0, stopped.stdout + stopped.stderr

    def status(self) -> dict[str, Any]:
        """What `shoal status --json` says."""
        told = self.shoal("status", "--json")
        assert told.returncode == 0, told.stdout + told.stderr
        answer: dict[str, Any] = json.loads(told.stdout)
        return answer

    def processes(self, role: str = "") -> list[dict[str, Any]]:
        """The processes of the cluster whose name begins with `role`."""
        return [p for p in self.status()["processes"] if p["name"].startswith(role)]

    def restarts(self) -> int:
        """How often any process was restarted."""
        return sum(process["restarts"] for process in self.processes())

    def logs(self) -> str:
        """The tail of every log, for the message of a failed assertion."""
        return "\n".join(
            f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}"
            for path in sorted((self.run_dir / "logs").glob("*.log"))
        )

    @property
    def base_url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def insider(self) -> nats.NATS:
        """A plain NATS client with the credentials of a service."""
        launch = json.loads((self.run_dir / "launch" / "gateway-0.json").read_text())
        return await nats.connect(
            launch["nats_url"], user=launch["nats_user"], password=launch["nats_password"]
        )

    async def outside_bus(self) -> NatsBus:
        """The bus as our client library has it in other systems."""
        access = json.loads((self.run_dir / "public.json").read_text())
        return await NatsBus.connect(
            access["url"], access["user"], access["password"], name="outside"
        )

    async def outsider(self) -> nats.NATS:
        """A plain NATS client with the credentials that the run directory gives to outsiders. What
        the server refuses it is not printed.
        """
        access = json.loads((self.run_dir / "public.json").read_text())

        async def silent(_error: Exception) -> None: ...

        return await nats.connect(
            access["url"], user=access["user"], password=access["password"], error_cb=silent
        )

    def client(self) -> openai.AsyncOpenAI:
        """The official client, without its own retries."""
        return openai.AsyncOpenAI(
            base_url=f"{self.base_url}/v1", api_key="none", max_retries=0, timeout=120
        )

    async def raw_post(
        self, path: str, body: bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """POST `body` as it is."""
        async with (
            aiohttp.ClientSession() as session,
            session.post(
                self.base_url + path,
                data=io.BytesIO(body),
                headers={"Content-Type": "application/json", **(headers or {})},
            ) as answer,
        ):
            return answer.status, await answer.read()

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST JSON, expect JSON."""
        status, answer = await self.raw_post(path, json.dumps(body).encode())
        assert status == 200, answer
        decoded: dict[str, Any] = json.loads(answer)
        return decoded

    async def metrics_text(self) -> str:
        """`/metrics` of whichever gateway answers."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.base_url}/metrics") as answer,
        ):
            return await answer.text()

    async def metrics(self) -> dict[str, float]:
        """`/metrics` as name -> sum over labels."""
        values: dict[str, float] = {}
        for line in (await self.metrics_text()).splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name = name.partition("{")[0]
                values[name] = values.get(name, 0.0) + float(value)
        return values

    async def quiet(self, within_s: float = 15.0) -> None:
        """Wait until nothing runs or waits and all KV blocks are free or evictable."""
        seen: dict[str, float] = {}
        try:
            async with asyncio.timeout(within_s):
                while True:
                    seen = await self.metrics()
                    if (
                        seen["vllm:num_requests_running"] == 0
                        and seen["vllm:num_requests_waiting"] == 0
                        and seen["shoal:kv_blocks_free"] == seen["shoal:kv_blocks_total"] > 0
                    ):
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"not quiet after {within_s} s: {seen}") from None

    async def all_ready(self, restarts: int, within_s: float = 60.0) -> None:
        """Wait until `restarts` restarts were seen in all and every process is ready."""
        processes: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(within_s):
                while True:
                    processes = await asyncio.to_thread(self.processes)
                    ready = all(process["state"] == "ready" for process in processes)
                    if ready and sum(process["restarts"] for process in processes) == restarts:
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            raise AssertionError(f"not ready after {within_s} s: {processes}") from None

    def __enter__(self) -> "Mesh":
        try:
            self.start()
        except BaseException:
            self.shoal("down")  # whatever of it came up
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def alive(pid: int) -> bool:
    """True while `pid` is a process that has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def slots_of(pid: int) -> list[str]:
    """The memory between workers and kv_tier that a process has mapped, each by its inode."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it is gone, or not ours
        return []
    return [line.split()[4] for line in maps if "/memfd:shoal-kv-slots" in line]
