"""A mesh on one machine: servers first, then services; kept running; taken down in reverse."""

import asyncio
import http
import os
import signal
import socket
import time
from collections.abc import Coroutine
from typing import Any

import msgspec

from deploy import control, servers
from deploy.child import Child, ChildSpec, Command
from deploy.children import Children, raise_failed
from deploy.config import ROLES, ClusterConfig
from deploy.errors import ClusterError
from deploy.launch import Launcher, environment, new_secret
from deploy.logs import cap
from deploy.model import Model
from deploy.progress import Progress, Ready, Stage
from deploy.run_dir import RunDir
from deploy.services import Services
from shared import subjects
from shared.errors import MeshError
from shared.liveness import LATE_S
from shared.log import log
from shared.messages import Died, encode
from shared.nats_bus import NatsBus

WATCH_S = 0.25
CAP_LOGS_S = 5.0
STOP_S = 5.0  # for a process that has nothing left to do
HTTP_POLL_S = 0.05
RECANCEL_S = 0.1
HTTP_TIMEOUT_S = 2.0
SERVERS = ("nats", "redis")

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
        self._children = Children(self._died)
        self._services: Services | None = None
        self._bus: NatsBus | None = None
        self._nats_url = ""
        self._state = "starting"
        self._stage = ""
        self._change: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()

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
            # First, or they would start processes behind the back of what ends them.
            await cancelled(coming_up, *([self._change] if self._change else []))
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
        shown = ", ".join(f"Redis {server.url_shown}" for server in redis) or "no Redis of ours"
        self._progress.tell(Stage("servers", f"NATS {nats.url_shown}, {shown}"))
        for server in (nats, *redis):
            self._children.keep(self._server_child(server))
        await self._until_ready()
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
        counts = {role: service.replicas for role, service in self._config.services.items()}
        self._progress.tell(Stage("services", f"{sum(counts.values())} processes"))
        self._services = Services(
            self._children, self._config.cluster, launcher.spec, self._retired
        )
        for role, count in counts.items():
            self._services.start(role, count)
        await self._until_ready()
        await self._until_http_ready()
        self._state = "ready"
        self._progress.tell(Ready(self.base_url, self._model.name))
        log.info("ready", base_url=self.base_url, processes=len(self._children))

    async def _go_down(self) -> None:
        """Gateways first, so that running answers may end; the servers last."""
        self._state = "stopping"
        log.info("stopping")
        await self._children.end(self._children.of("gateway"), self._config.cluster.drain_s)
        await self._children.end(self._children.of(*ROLES), STOP_S)
        if self._bus is not None:
            await self._bus.close()
        await self._children.end(self._children, STOP_S)

    @property
    def base_url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    # --- children --------------------------------------------------------------------------------

    def _server_specs(self) -> tuple[servers.Server, list[servers.Server]]:
        run_dir, table = self._run_dir.servers, self._config.redis
        try:
            nats = servers.nats_server(run_dir, self._config.nats.port)
            redis = [
                servers.redis_server(run_dir, table.maxmemory_mb, ordinal)
                for ordinal in range(0 if table.urls else table.servers)
            ]
        except servers.ServerError as error:
            raise ClusterError(f"{error}.") from error
        self._run_dir.write_public(
            {"url": nats.url, "user": nats.public_user, "password": nats.public_password}
        )
        nats, *redis = [
            msgspec.structs.replace(server, log=self._run_dir.log_file(server.name))
            for server in (nats, *redis)
        ]
        return nats, redis

    def _server_child(self, server: servers.Server) -> ChildSpec:
        def command(_instance: str, _status_fd: int) -> Command:
            return Command(server.command, environment(server.name, 1))

        return ChildSpec(
            name=server.name,
            role=server.name.partition("-")[0],
            log=server.log,
            command=command,
            server=server,
            restart=self._config.cluster.restart,
            silence=self._config.cluster.silence,
        )

    def _died(self, child: Child, reason: str) -> None:
        """Tell the mesh at once; silence would tell it a second later."""
        log.warning("died", child=child.spec.name, instance=child.instance, reason=reason)
        self._announce(child, reason)

    def _retired(self, child: Child) -> None:
        """It said good-bye itself; this is for what was sent to it meanwhile."""
        log.info("retired", child=child.spec.name, instance=child.instance)
        self._announce(child, "retired")

    def _announce(self, child: Child, reason: str) -> None:
        if self._bus is not None and child.spec.role not in SERVERS:
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

    async def _until_ready(self) -> None:
        timeout_s = self._config.cluster.ready_timeout_s
        await self._children.until_ready(list(self._children), timeout_s, self._show_stage)

    def _show_stage(self) -> None:
        """A line when the slowest worker begins a new stage of its start."""
        details = {child.status.detail for child in self._children.of("gpu_worker")}
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
        if not self._children.of("gateway"):
            return
        try:
            async with asyncio.timeout(self._config.cluster.ready_timeout_s):
                while await http_status(self._listener, "/ready") != http.HTTPStatus.OK:
                    raise_failed(self._children)
                    await asyncio.sleep(HTTP_POLL_S)
        except TimeoutError:
            raise ClusterError(
                f"{self.base_url}/ready does not turn 200; see {self._run_dir.logs}."
            ) from None

    # --- control ---------------------------------------------------------------------------------

    async def handle(self, command: control.Command, tell: control.Tell) -> control.Answer:
        """Do what a person asks through the control socket."""
        match command.verb:
            case "status":
                return control.Answer(status=self.status())
            case "down":
                self.stop()
                return control.Answer()
            case "scale" | "rolling":
                if self._services is None or self._state != "ready":
                    return control.Answer(error=f"The mesh is {self._state}, not ready.")
                if command.verb == "scale":
                    change = self._services.scale(command.name, command.count, tell)
                else:
                    change = self._services.roll(command.names, tell)
                return await self._do(change)
        return self._signal(command)

    async def _do(self, change: Coroutine[Any, Any, None]) -> control.Answer:
        """One change at a time: the next one begins with processes that are settled."""
        if self._change is not None and not self._change.done():
            change.close()
            return control.Answer(error="Another `shoal scale` or `shoal rolling` is at work.")
        self._change = asyncio.create_task(change)
        await asyncio.wait({self._change})
        if self._change.cancelled():
            return control.Answer(error="The mesh is going down.")
        try:
            self._change.result()
        except ClusterError as error:
            return control.Answer(error=str(error))
        return control.Answer()

    def _signal(self, command: control.Command) -> control.Answer:
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
                child.kill("killed by command", asked=True)
            case "pause":
                child.pause()
            case "resume":
                child.resume()
        return control.Answer()

    def status(self) -> control.ClusterStatus:
        """Every process, its state, load and restarts."""
        host, port = self._listener.getsockname()[:2]
        now = time.monotonic()
        children = self._children.of(*SERVERS, *ROLES)
        lost = self._state == "ready" and any(child.state == "failed" for child in children)
        return control.ClusterStatus(
            state="degraded" if lost else self._state,
            supervisor_pid=os.getpid(),
            host=host,
            port=port,
            model=self._model.name,
            drain_s=self._config.cluster.drain_s,
            nats_url=self._nats_url,
            run_dir=str(self._run_dir.path),
            processes=[describe(child, now) for child in children],
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
