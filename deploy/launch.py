"""How one service process is started: its launch file and its command line."""

import os
import secrets
import sys
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from deploy import servers
from deploy.child import ChildSpec, Command
from deploy.config import ClusterConfig
from deploy.model import Model
from deploy.run_dir import RunDir
from shared.config import STEP_THREADS, Launch


class Launcher(Struct, frozen=True):
    """What all services of one cluster have in common."""

    config: ClusterConfig
    model: Model
    run_dir: RunDir
    nats: servers.Server
    redis: list[servers.Server]
    listen_fd: int
    secret: str  # hex

    def spec(self, role: str, ordinal: int, replicas: Callable[[], int]) -> ChildSpec:
        """One service process; `replicas` = how many of its role there are at a start of it."""
        name = f"{role}-{ordinal}"

        def command(instance: str, status_fd: int) -> Command:
            launch = self.launch(role, name, instance, status_fd)
            file = self.run_dir.write_launch(name, launch)
            return Command(
                argv=[sys.executable, "-m", "deploy.cli", "run", role, "--launch", str(file)],
                env=environment(role, replicas()),
                pass_fds=() if launch.listen_fd is None else (launch.listen_fd,),
            )

        return ChildSpec(
            name=name,
            role=role,
            ordinal=ordinal,
            log=self.run_dir.log_file(name),
            command=command,
            restart=self.config.cluster.restart,
            silence=self.config.cluster.silence,
        )

    def launch(self, role: str, name: str, instance: str, status_fd: int) -> Launch:
        """The launch file of one start."""
        settings = self.config.services[role].settings
        if role == "gateway":  # its streams may run so long, unless it is told to hurry
            settings = {"drain_s": self.config.cluster.retire_s, **settings}
        return Launch(
            role=role,
            name=name,
            instance=instance,
            pool=self.config.cluster.pool,
            model=str(self.model.path),
            model_name=self.model.name,
            nats_url=self.config.nats.services_url or self.nats.url,
            nats_user=self.nats.user,
            nats_password=self.nats.password,
            redis_url=",".join(self._redis_urls()),
            secret=self.secret,
            run_dir=str(self.run_dir.path),
            listen_fd=self.listen_fd if role == "gateway" else None,
            status_fd=status_fd,
            settings=settings,
        )

    def _redis_urls(self) -> list[str]:
        """Those of others, or ours, the first of them perhaps by way of a proxy."""
        urls = self.config.redis.urls or [server.url for server in self.redis]
        if self.redis and (path := self.config.redis.services_socket):
            urls[0] = servers.redis_url(Path(path), self.redis[0].password)
        return urls


def new_secret() -> str:
    """Roots the block hashes of one cluster; 32 bytes, hex."""
    return secrets.token_hex(32)


def environment(role: str, replicas: int) -> dict[str, str]:
    """Ours, and how many threads numeric libraries may start.

    Only the engine computes; the default of one thread per CPU in every process thrashes. One CPU
    is the mesh's own: in torch, two threads on two CPUs gave 0.75 to 0.95 of one thread's tokens/s.
    The compiled step waits for its threads in its own way and uses both: 1.8 times the tokens/s at
    1 stream, 1.4 at 8 and 1.3 at 32, the whole mesh beside it.
    """
    cpus = len(os.sched_getaffinity(0))
    engines = max(1, replicas)
    threads = max(1, (cpus - 1) // engines) if role == "gpu_worker" else 1
    defaults = {
        STEP_THREADS: str(max(1, (cpus - (cpus > 2)) // engines)),
        "OMP_NUM_THREADS": str(threads),
        # Kernel threads that wait spin by default, on cores that the mesh needs. Two threads on two
        # busy cores: 12 tokens/s passive, below 1 spinning.
        "OMP_WAIT_POLICY": "PASSIVE",
        "RAYON_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
    }
    return {**defaults, **os.environ, "PYTHONUNBUFFERED": "1"}
