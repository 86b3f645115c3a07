"""How a process of the mesh is told what it is. Unknown or bad keys stop it, naming the key."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

T = TypeVar("T")

AboveZero = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Natural = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]
"""Bounds of settings, checked by `settings`."""

STEP_THREADS = "SHOAL_STEP_THREADS"
"""In the environment of a worker: threads of its compiled step, its share of the host's CPUs."""


class Launch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Written by the supervisor (0600) for each start of a process; read once by `shoal run`."""

    role: str
    name: str  # stable: gpu_worker-0
    instance: str  # new at every start: gpu_worker-0-3f9a2c
    pool: str = "default"
    model: str = ""  # path of a GGUF file or a Hugging Face directory
    model_name: str = ""  # what clients call it
    nats_url: str
    nats_user: str
    nats_password: str
    redis_url: str = ""
    secret: str = ""  # hex; roots the block hashes of this cluster
    run_dir: str
    listen_fd: int | None = None  # gateways: the inherited listening socket
    status_fd: int | None = None  # where to report `Status` lines to the supervisor
    settings: dict[str, Any] = {}  # the role's own table of cluster.toml


class Status(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One JSON line a process writes to `status_fd` every 250 ms; silent for 10 s = killed."""

    state: str  # starting, ready, draining
    detail: str = ""  # the stage while starting: weights, warm-up
    load: int = 0
    extra: dict[str, int | str] = {}


class ConfigError(Exception):
    """A setting is unknown, of the wrong type or out of bounds; the message names it."""


def read_launch(path: Path) -> Launch:
    """The launch file at `path`; raises `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Launch)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(f"launch file {path}: {error}") from error


def settings(raw: dict[str, Any], kind: type[T], section: str) -> T:
    """`raw` as the frozen Struct `kind` (declared with `forbid_unknown_fields`).

    Raises `ConfigError` that names the section and the key.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[{section}] {error}") from error
