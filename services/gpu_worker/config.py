"""What a worker can be told: `[gpu_worker]` of cluster.toml."""

from typing import Literal

from msgspec import Struct


class SimConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engine = "sim"`: how fast, how large and how talkative the simulated model is."""

    step_ms: float = 20.0  # fixed cost of a step; about the real model on two cores
    per_token_us: float = 100.0  # added per computed id
    num_blocks: int = 4096  # KV memory; 64 Ki ids in blocks of 16
    max_model_len: int = 8192  # ids
    vocab_size: int = 32768  # only without a model, whose vocabulary is used otherwise
    bound_ms: int = 2000  # added to ten times the step time; beyond, the engine counts as hung
    output_tokens_min: int = 32  # answers end between these two lengths, by their prompt
    output_tokens_max: int = 256  # 0 = never end by themselves
    nan_id: int | None = None  # a prompt with this id yields NaN logits
    crash_id: int | None = None  # a prompt with this id kills the engine process

    def __post_init__(self) -> None:
        if self.step_ms < 0 or self.per_token_us < 0:
            raise ValueError("sim.step_ms and sim.per_token_us must not be negative")
        if min(self.num_blocks, self.max_model_len, self.vocab_size) < 1:
            raise ValueError("sim.num_blocks, max_model_len and vocab_size must be at least 1")
        if self.output_tokens_max and not 1 <= self.output_tokens_min <= self.output_tokens_max:
            raise ValueError("sim.output_tokens_min must be 1 to sim.output_tokens_max")


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker: its I/O process and its engine process."""

    engine: Literal["model", "sim"] = "model"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"  # auto = bf16 where it is fast
    num_threads: int = 0  # of the engine's kernels; 0 = one per CPU this process may use
    num_blocks: int | None = None  # None = as many as fit in `kv_bytes_max`
    kv_bytes_max: int = 1 << 30  # bytes of KV memory; 1 GiB holds 45 Ki ids of the default model
    max_model_len: int | None = None  # ids; None = what the model was trained for
    max_legs: int = 64  # legs in one step; beyond, a CPU step outlasts a reader's patience
    max_batched_tokens: int = 256  # ids in one step; larger prefill chunks gain nothing on a CPU
    max_waiting: int = 1024  # legs not in a step; more are refused as overloaded
    lease_s: float = 5.0  # a leg not renewed for this long is dropped
    finished_s: float = 10.0  # a finished leg can be asked for or adopted for this long
    finished_max: int = 4096  # finished legs kept with their ids; the oldest go first
    tombstone_s: float = 60.0  # a late `Run` of an ended epoch is recognized for this long
    tombstones_max: int = 65536  # entries; the oldest go first
    drain_s: float = 5.0  # legs may finish for this long after SIGTERM, then move elsewhere
    inbound_bytes_max: int = 64 << 20  # queued for a busy engine; beyond, messages are dropped
    sim: SimConfig = SimConfig()

    def __post_init__(self) -> None:
        if self.max_legs < 1:
            raise ValueError("max_legs must be at least 1")
        if self.max_batched_tokens < self.max_legs:
            raise ValueError("max_batched_tokens must not be below max_legs: each leg decodes one")
        if min(self.lease_s, self.finished_s, self.tombstone_s, self.drain_s) < 0:
            raise ValueError("lease_s, finished_s, tombstone_s and drain_s must not be negative")


class EngineLaunch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's one argument, as JSON. The descriptors are inherited."""

    instance: str
    model: str  # path; "" only with `engine = "sim"`
    config: WorkerConfig
    channel_fd: int
    page_fd: int
    parent_pid: int
