"""A mesh on one machine: servers first, then services; kept running; taken down in reverse."""

import asyncio
import http
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from deploy import control, servers
from deploy.child import Child, ChildSpec, Command
from deploy.config import ClusterConfig
from deploy.errors import ClusterError
from deploy.launch import Launcher, environment, new_secret
from deploy.logs import cap, last_line
from deploy.model import Model
from deploy.progress import Progress, Ready, Stage
from deploy.run_dir import RunDir
from shared import subjects
from shared.errors import MeshError
from shared.liveness import LATE_S
from shared.log import log
from shared.messages import Died, encode
from shared.nats_bus import NatsBus

WATCH_S = 0.25
CAP_LOGS_S = 5.0
STOP_S = 5.0  # between SIGTERM and SIGKILL; for gateways beside what running answers may take
HTTP_POLL_S = 0.05
RECANCEL_S = 0.1
HTTP_TIMEOUT_S = 2.0

STAGES = {"weights": "loading {model} on each worker", "warm-up": "first steps of the engine"}
"""What a worker's `Status.detail` means for the person who waits."""


class Cluster:
    """Everything that runs for one `shoal up`."""

    def __init__(
        self,
        config: ClusterConfig,
        model: Model,
        run_dir: RunDir,
        listener: socket.socket,
        progress: Progress,
    ) -> None:
        self._config = config
        self._model = model
        self._run_dir = run_dir
        self._listener = listener
        self._progress = progress
        self._servers: list[Child] = []
        self._services: list[Child] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._bus: NatsBus | None = None
        self._nats_url = ""
        self._state = "starting"
        self._stage = ""
        self._changed = asyncio.Event()
        self._stop = asyncio.Event()

    @property
    def _children(self) -> list[Child]:
        return [*self._servers, *self._services]

    # --- life ------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Come up, stay up until `stop`, go down; raises `ClusterError` if it cannot come up."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.stop)
        door = await control.serve(self._run_dir.path, self.handle)
        watch = asyncio.create_task(self._watch())
        coming_up = asyncio.create_task(self._come_up())
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({coming_up, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if coming_up.done():
                coming_up.result()
                await stopping
        finally:
            # First, or it would start processes behind the back of what ends them.
            await cancelled(coming_up)
            await self._go_down()
            door.close()
            await cancelled(watch, stopping)

    def stop(self) -> None:
        """Go down; asked a second time, do not wait for anyone."""
        if self._stop.is_set():
            for child in self._children:
                child.signal(signal.SIGKILL)
        self._stop.set()

    async def _come_up(self) -> None:
        nats, redis = self._server_specs()
        self._nats_url = nats.url
        self._progress.tell(Stage("servers", f"NATS {nats.url_shown}, Redis {redis.url_shown}"))
        for server in (nats, redis):
            self._servers.append(self._keep(self._server_child(server)))
        await self._until(self._servers_ready)
        try:
            self._bus = await NatsBus.connect(nats.url, nats.user, nats.password, name="supervisor")
        except MeshError as error:
            raise ClusterError(f"No connection to NATS: {error}.") from error
        launcher = Launcher(
            self._config,
            self._model,
            self._run_dir,
            nats,
            redis,
            self._listener.fileno(),
            new_secret(),
        )
        specs = launcher.specs()
        self._progress.tell(Stage("services", f"{len(specs)} processes"))
        self._services.extend(self._keep(spec) for spec in specs)
        await self._until(self._services_ready)
        await self._until_http_ready()
        self._state = "ready"
        self._progress.tell(Ready(self.base_url, self._model.name))
        log.info("ready", base_url=self.base_url, processes=len(self._children))

    async def _go_down(self) -> None:
        """Gateways first, so that running answers may end; the servers last."""
        self._state = "stopping"
        log.info("stopping")
        gateways = [c for c in self._services if c.spec.role == "gateway"]
        others = [c for c in self._services if c.spec.role != "gateway"]
        await self._end(gateways, self._config.cluster.drain_s + STOP_S)
        await self._end(others, STOP_S)
        if self._bus is not None:
            await self._bus.close()
        await self._end(self._servers, STOP_S)

    async def _end(self, children: Iterable[Child], grace_s: float) -> None:
        await asyncio.gather(*(child.stop(grace_s) for child in children))
        await asyncio.gather(*(self._tasks[child.spec.name] for child in children))

    @property
    def base_url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    # --- children --------------------------------------------------------------------------------

    def _server_specs(self) -> tuple[servers.Server, servers.Server]:
        try:
            nats = servers.nats_server(self._run_dir.servers, self._config.nats.port)
            redis = servers.redis_server(self._run_dir.servers, self._config.redis.maxmemory_mb)
        except servers.ServerError as error:
            raise ClusterError(f"{error}.") from error
        self._run_dir.write_public(
            {"url": nats.url, "user": nats.public_user, "password": nats.public_password}
        )
        logs = self._run_dir.log_file
        return (
            msgspec.structs.replace(nats, log=logs("nats")),
            msgspec.structs.replace(redis, log=logs("redis")),
        )

    def _server_child(self, server: servers.Server) -> ChildSpec:
        async def probe() -> bool:
            return server.ready()  # may hold the loop for half a second; asked only at a start

        def command(_instance: str, _status_fd: int) -> Command:
            return Command(server.command, environment(server.name, 1))

        return ChildSpec(
            name=server.name,
            role=server.name,
            log=server.log,
            command=command,
            probe=probe,
            why_not=server.why_not,
            restart=self._config.cluster.restart,
        )

    def _keep(self, spec: ChildSpec) -> Child:
        child = Child(spec, self._died, self._changed.set)
        self._tasks[spec.name] = asyncio.create_task(child.run())
        return child

    def _died(self, child: Child, reason: str) -> None:
        """Tell the mesh at once; silence would tell it a second later."""
        log.warning("died", child=child.spec.name, instance=child.instance, reason=reason)
        if self._bus is not None and child in self._services:
            self._bus.publish(subjects.DIED, encode(Died(instance=child.instance, reason=reason)))

    async def _watch(self) -> None:
        """Kill who is silent, unless it was us who slept; keep the logs small."""
        next_cap = time.monotonic()
        while True:
            due = time.monotonic() + WATCH_S
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            for child in self._children:
                if now - due > LATE_S:
                    child.silence.slept(now)
                child.check_silence(now)
            if now >= next_cap:
                next_cap = now + CAP_LOGS_S
                for child in self._children:
                    cap(child.spec.log)

    # --- readiness -------------------------------------------------------------------------------

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`; raises `ClusterError` when a child is given up or time is out."""
        timeout_s = self._config.cluster.ready_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                while not ready():
                    self._raise_failed()
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            waiting = [c.spec.name for c in self._children if c.state != "ready"]
            raise ClusterError(
                f"Not ready after {timeout_s:g} s: {', '.join(waiting)}; see {self._run_dir.logs}."
            ) from None

    def _raise_failed(self) -> None:
        for child in self._children:
            if child.state == "failed":
                raise ClusterError(self._why_failed(child))

    def _why_failed(self, child: Child) -> str:
        if child.spec.why_not is not None:
            return f"{child.spec.why_not()}."
        return f"{child.spec.name} cannot run ({child.reason}): {last_line(child.spec.log)}"

    def _servers_ready(self) -> bool:
        return all(child.state == "ready" for child in self._servers)

    def _services_ready(self) -> bool:
        self._show_stage()
        return all(child.state == "ready" for child in self._services)

    def _show_stage(self) -> None:
        """A line when the slowest worker begins a new stage of its start."""
        details = {c.status.detail for c in self._services if c.spec.role == "gpu_worker"}
        for detail in [d for d in STAGES if d in details][:1]:
            if detail != self._stage and not self._later(detail):
                self._stage = detail
                self._progress.tell(Stage(detail, STAGES[detail].format(model=self._model.name)))

    def _later(self, detail: str) -> bool:
        """True when a stage after `detail` was shown: a worker began anew."""
        order = list(STAGES)
        return self._stage in order and order.index(self._stage) > order.index(detail)

    async def _until_http_ready(self) -> None:
        """The gateways say that the mesh behind them can serve."""
        if not self._config.services["gateway"].replicas:
            return
        try:
            async with asyncio.timeout(self._config.cluster.ready_timeout_s):
                while await http_status(self._listener, "/ready") != http.HTTPStatus.OK:
                    self._raise_failed()
                    await asyncio.sleep(HTTP_POLL_S)
        except TimeoutError:
            raise ClusterError(
                f"{self.base_url}/ready does not turn 200; see {self._run_dir.logs}."
            ) from None

    # --- control ---------------------------------------------------------------------------------

    def handle(self, command: control.Command) -> control.Answer:
        """Do what a person asks through the control socket."""
        if command.verb == "status":
            return control.Answer(status=self.status())
        if command.verb == "down":
            self.stop()
            return control.Answer()
        child = next((c for c in self._children if c.spec.name == command.name), None)
        if child is None:
            names = ", ".join(c.spec.name for c in self._children)
            return control.Answer(
                error=f"There is no process {command.name!r}; there are: {names}."
            )
        if not child.pid:
            return control.Answer(error=f"{command.name} does not run now ({child.state}).")
        match command.verb:
            case "kill":
                child.kill("killed by command")
            case "pause":
                child.pause()
            case "resume":
                child.resume()
        return control.Answer()

    def status(self) -> control.ClusterStatus:
        """Every process, its state, load and restarts."""
        host, port = self._listener.getsockname()[:2]
        now = time.monotonic()
        return control.ClusterStatus(
            state=self._state,
            supervisor_pid=os.getpid(),
            host=host,
            port=port,
            model=self._model.name,
            drain_s=self._config.cluster.drain_s,
            nats_url=self._nats_url,
            run_dir=str(self._run_dir.path),
            processes=[describe(child, now) for child in self._children],
        )


async def cancelled(*tasks: asyncio.Task[Any]) -> None:
    """Return when all have ended. Asked again and again: nats-py swallows a cancellation that comes
    while it connects.
    """
    while not all(task.done() for task in tasks):
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=RECANCEL_S)
    await asyncio.gather(*tasks, return_exceptions=True)


def describe(child: Child, now: float) -> control.ProcessStatus:
    """One row of `shoal status`."""
    return control.ProcessStatus(
        name=child.spec.name,
        state=child.state,
        pid=child.pid,
        instance=child.instance,
        load=child.status.load if child.pid else 0,
        restarts=child.restarts.total,
        uptime_s=round(now - child.started, 1) if child.pid else 0.0,
        detail=child.status.detail or (child.reason and f"last end: {child.reason}"),
        extra=child.status.extra,
    )


async def http_status(listener: socket.socket, path: str) -> int:
    """Status of a GET at whoever accepts from `listener`; 0 = no answer."""
    host, port = listener.getsockname()[:2]
    try:
        async with asyncio.timeout(HTTP_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(
                    f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
                )
                words = (await reader.readline()).split()
            finally:
                writer.close()
        return int(words[1])
    except (OSError, TimeoutError, IndexError, ValueError):
        return 0
