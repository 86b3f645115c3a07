"""The mesh that is broken: two of each, a proxy in front of each server, looked at from outside."""

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from deploy import control
from deploy.errors import ClusterError
from deploy.servers import free_port
from kernels.cpu.library import cpu_flags
from shared.bus import Delivery
from shared.nats_bus import NatsBus
from tests.chaos.nats_proxy import NatsProxy
from tests.mesh.cluster import Mesh, slots_of
from tests.shared.proxy import Proxy

TWO_OF_EACH = tuple(
    f"{role}.replicas=2"
    for role in ("gateway", "tokenizer", "scheduler", "gpu_worker", "detokenizer")
)
# A child that dies ten times within a minute is what this is about, not a reason to give it up.
RESTART = ("cluster.restart.limit=1000", "cluster.restart.window_s=2")
POISON = {"crash": 11, "nan": 12, "raise": 13, "oom": 14}
"""Ids that the tokenizer never makes of text (unused special tokens): a prompt with one of them
does to the simulated engine what its name says."""
SIMULATED = (
    "--engine",
    "sim",
    *("gpu_worker.l2_insure_ms=0", "gpu_worker.l2_min_blocks=0"),  # short legs, too, go to L2,
    f"gpu_worker.l2_slots_bytes={16 * 128}",  # through so few slots that they run out
    *(f"gpu_worker.sim.{kind}_id={id_}" for kind, id_ in POISON.items()),
)
REAL = (
    *("--engine", "real"),
    # The precisions whose texts are the same in any company; the first is the default where fast.
    "gpu_worker.quantize=w8a8" if b"avx512_vnni" in cpu_flags() else "gpu_worker.dtype=fp32",
)
# Less than by default, so that it can be filled; and forgotten sooner, so that a long run does not.
STORE = ("gateway.stored.bytes_max=67108864", "gateway.stored.age_s=300")
POLL_S = 0.05
ANSWERS_S = 0.3  # for all instances of a role to answer
ENGINE = b"services.gpu_worker.engine"


class Victim(NamedTuple):
    """A process, or a worker's half."""

    name: str  # gpu_worker-0, gpu_worker-0.engine
    pid: int
    group: bool = False  # signals go to its process group


class Held(NamedTuple):
    """What one process holds."""

    state: str
    load: int  # requests or legs in hand
    blocks_used: int
    tasks: int
    files: int
    slots: int  # memories of workers that it has mapped
    subscriptions: int


class Site:
    """A running cluster whose services reach NATS and Redis through proxies of ours."""

    def __init__(self, run_dir: Path, *options: str) -> None:
        self.run_dir = run_dir
        port = free_port()
        sockets = run_dir / "servers"
        self.nats = NatsProxy(f"nats://127.0.0.1:{port}")
        self.redis = Proxy(
            f"unix://{sockets / 'redis.sock'}",
            listen=f"unix://{run_dir / 'proxy.sock'}",
            record=False,
        )
        self._options = (*options, *TWO_OF_EACH, *RESTART, *STORE, f"nats.port={port}")
        self.mesh = Mesh(run_dir)

    async def __aenter__(self) -> "Site":
        self.run_dir.mkdir(parents=True, exist_ok=True)
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.nats)
            await stack.enter_async_context(self.redis)
            self.mesh = Mesh(
                self.run_dir,
                *self._options,
                f"nats.services_url={self.nats.url}",
                f"redis.services_socket={self.run_dir / 'proxy.sock'}",
            )
            stack.push_async_callback(asyncio.to_thread, self.mesh.shoal, "down")
            await asyncio.to_thread(self.mesh.start)
            self.bus = await self._insider()
            stack.push_async_callback(self.bus.close)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    # --- looking ----------------------------------------------------------------------------------

    async def status(self) -> list[control.ProcessStatus]:
        """Every process, as the supervisor sees it."""
        return (await asyncio.to_thread(control.status, self.run_dir)).processes

    async def instances(self, role: str) -> list[str]:
        """The names under which those of `role` are on the bus."""
        return [p.instance for p in await self.status() if p.name.partition("-")[0] == role]

    async def victims(self, target: str) -> list[Victim]:
        """The running processes that `target` means: a role, `scheduler.leader`,
        `scheduler.standby`, `gpu_worker.io` or `gpu_worker.engine`.
        """
        role, _, part = target.partition(".")
        found = []
        for process in await self.status():
            if process.name.partition("-")[0] != role or not process.pid:
                continue
            name = f"{process.name}.{part}" if part else process.name
            match part:
                case "engine":
                    found += [Victim(name, pid) for pid in engines_of(process.pid)]
                case "io":
                    found.append(Victim(name, process.pid))
                case "leader" | "standby":
                    if bool(process.extra.get("leading")) == (part == "leader"):
                        found.append(Victim(process.name, process.pid, group=True))
                case _:
                    found.append(Victim(name, process.pid, group=True))
        return found

    async def outsider(self) -> NatsBus:
        """The bus as other systems have it."""
        return await self.mesh.outside_bus()

    def redis_url(self) -> str:
        """The Redis server itself, past the proxy, with its password."""
        proxied: str = self._launch("kv_tier-0")["redis_url"]
        return proxied.replace("proxy.sock", "servers/redis.sock")

    async def counters(self, role: str) -> Counter[str]:
        """What the live instances of `role` have counted, summed up."""
        return sum((await self.told(role)).values(), Counter())

    async def told(self, role: str) -> dict[str, Counter[str]]:
        """What each live instance of `role` has counted since its start."""
        counts: dict[str, Counter[str]] = {}

        def take(delivery: Delivery) -> None:
            answer = msgspec.json.decode(delivery.payload)
            counts[answer["id"]] = Counter(answer["endpoints"][0]["data"])

        inbox = f"_MESH_INBOX.{secrets.token_hex(8)}"
        subscription = await self.bus.subscribe(inbox, take)
        self.bus.publish(f"$SRV.STATS.shoal-{role.replace('_', '-')}", b"", inbox)
        await asyncio.sleep(ANSWERS_S)
        await subscription.unsubscribe()
        return counts

    def _launch(self, name: str) -> dict[str, Any]:
        launch: dict[str, Any] = msgspec.json.decode(
            (self.run_dir / "launch" / f"{name}.json").read_bytes()
        )
        return launch

    async def _insider(self) -> NatsBus:
        """The bus as a service has it, past the proxy."""
        launch = self._launch("gateway-0")
        url = (await asyncio.to_thread(control.status, self.run_dir)).nats_url
        return await NatsBus.connect(url, launch["nats_user"], launch["nats_password"], name="kit")

    # --- rest -------------------------------------------------------------------------------------

    async def held(self) -> dict[str, Held]:
        """What each process holds now, by its name."""
        subscriptions = self.nats.subscriptions
        return {
            process.name: Held(
                state=process.state,
                load=process.load,
                blocks_used=int(process.extra.get("total_blocks", 0))
                - int(process.extra.get("free_blocks", 0)),
                tasks=int(process.extra.get("tasks", 0)),
                files=count_files(process.pid),
                slots=len(slots_of(process.pid)),
                subscriptions=subscriptions.get(process.instance, 0),
            )
            for process in await self.status()
        }

    async def rest(self, baseline: dict[str, Held] | None, within_s: float) -> tuple[str, ...]:
        """Wait until the mesh holds nothing that it did not hold in `baseline`; what it still holds
        after `within_s`.
        """
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(ClusterError):
                still = leaks(await self.held(), baseline or {})
                if not still or time.monotonic() > deadline:
                    return still
            await asyncio.sleep(POLL_S)


def leaks(now: dict[str, Held], baseline: dict[str, Held]) -> tuple[str, ...]:
    """What `now` holds that a mesh at rest does not; a process is compared with itself and with
    its like, because either of two gateways may have been the busier one in `baseline`. Pure.
    """
    most: dict[str, Held] = {}
    for name, held in baseline.items():
        role = name.partition("-")[0]
        most[role] = Held(*map(max, held, most.get(role, held)))
    found = []
    for name, held in now.items():
        if held.state != "ready":
            found.append(f"{name} is {held.state}")
        if held.load:
            found.append(f"{name} has {held.load} in hand")
        if held.blocks_used:
            found.append(f"{name} holds {held.blocks_used} blocks")
        limit = most.get(name.partition("-")[0])
        if limit is None:
            continue
        for what in ("tasks", "files", "slots", "subscriptions"):
            have, may = getattr(held, what), getattr(limit, what)
            if have > may:
                found.append(f"{name} has {have} {what}, {may} before")
    return tuple(found)


def count_files(pid: int) -> int:
    """Open descriptors of a process; 0 when it is gone."""
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return 0


def engines_of(pid: int) -> list[int]:
    """The engine processes that a worker's I/O process started."""
    children: list[int] = []
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, tasks.read_text().split())
    return [child for child in children if ENGINE in command_of(child)]


def command_of(pid: int) -> bytes:
    """The command line of a process; empty when it is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def state_of(pid: int) -> str:
    """R, S, D, T (stopped), …; "" when the process has ended, a zombie too."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return "" if state in "ZX" else state
    return ""
