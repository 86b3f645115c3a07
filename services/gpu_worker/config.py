"""What a worker can be told: `[gpu_worker]` of cluster.toml."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.gpu_worker.kv_policy import FULL, KvPolicy
from shared.config import AboveZero, Count, Natural, NotNegative

AtLeastOne = Annotated[float, Meta(ge=1)]
Sinks = Annotated[int, Meta(ge=1, le=256)]  # as many as one sum over values takes
Share = Annotated[float, Meta(ge=0, le=1)]

EX_CONFIG = 78
"""Exit status of an engine for which a file or a setting is no good, as sysexits.h has it."""


class SimConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`engine = "sim"`: how fast, how large and how talkative the simulated model is."""

    step_ms: NotNegative = 20.0  # fixed cost of a step; about the real model on two cores
    per_token_us: NotNegative = 100.0  # added per computed id
    num_blocks: Count = 4096  # KV memory; 64 Ki ids in blocks of 16
    max_model_len: Count = 8192  # ids
    vocab_size: Count = 32768  # only without a model, whose vocabulary is used otherwise
    bound_ms: Count = 2000  # added to ten times the step time; beyond, the engine counts as hung
    output_tokens_min: Count = 32  # answers end between these two lengths, by their prompt
    output_tokens_max: Natural = 256  # 0 = never end by themselves
    nan_id: int | None = None  # a prompt with this id yields NaN logits
    crash_id: int | None = None  # a prompt with this id kills the engine process
    raise_id: int | None = None  # a prompt with this id makes the step raise
    oom_id: int | None = None  # a prompt with this id finds no memory

    def __post_init__(self) -> None:
        if self.output_tokens_max and not 1 <= self.output_tokens_min <= self.output_tokens_max:
            raise ValueError("sim.output_tokens_min must be 1 to sim.output_tokens_max")


class WorkerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One worker: its I/O process and its engine process."""

    engine: Literal["model", "sim"] = "model"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"  # auto = bf16 where it is fast
    quantize: Literal["auto", "none", "w8a8"] = "auto"  # auto = int8 where it is fast, but not
    # where `dtype` asks for another precision
    num_threads: Natural = 0  # of the engine's kernels; 0 = its share of the CPUs
    num_blocks: Count | None = None  # None = as many as fit in `kv_bytes_max`
    kv_bytes_max: Count = 1 << 30  # bytes of KV memory; 1 GiB holds 45 Ki ids of the default model
    kv_dtype: Literal["auto", "bf16", "int8"] = "auto"  # of K and V; auto = what is computed in;
    # int8, with a scale per token and head, holds about twice as many ids
    kv_policy: Literal["full", "window", "sinks"] = "full"  # others drop ids: docs/quality.md
    kv_window: Natural = 0  # ids that an id sees under `window` and `sinks`, itself included
    kv_sinks: Sinks = 4  # first ids that `sinks` keeps in sight, rounded up to whole blocks of 16
    packed_dir: str = ""  # int8 weights ready to map; "" = .cache/packed of the checkout
    packed_bytes_max: Natural = 8 << 30  # there; what was used last stays; 0 = keep none
    max_model_len: Count | None = None  # ids; None = what the model was trained for
    max_legs: Count = 64  # legs in one step; beyond, a CPU step outlasts a reader's patience
    max_batched_tokens: Count = 256  # ids in one step; larger prefill chunks gain nothing on a CPU
    slowdown_max: AtLeastOne = 2.0  # times the time between two tokens of a running stream, while
    # prompts are computed beside it (they get half of it); 2.5 left the slowest steps above 3 times
    eviction: Literal["lru", "lfu"] = "lru"  # which cached block goes first: least lately or least
    # often used; lfu where a few prefixes come again among many that do not
    tenant_share: Share = 1.0  # of the blocks; a tenant whose cached ones are more loses its own
    # first; 1 = nobody does
    pinned_share: Share = 0.25  # of the blocks that requests may pin; over it the oldest pin ends
    pin_s: AboveZero = 3600.0  # a prompt whose request asks for it stays cached for so long
    max_waiting: Count = 1024  # legs not in a step; more are refused as overloaded
    lease_s: NotNegative = 5.0  # a leg not renewed for this long is dropped
    finished_s: NotNegative = 10.0  # a finished leg can be asked for or adopted for this long
    finished_max: Count = 4096  # finished legs kept with their ids; the oldest go first
    tombstone_s: NotNegative = 60.0  # a late `Run` of an ended epoch is recognized for this long
    tombstones_max: Count = 65536  # entries; the oldest go first
    drain_s: NotNegative = 5.0  # legs may finish for this long after SIGTERM, then move elsewhere
    inbound_bytes_max: Count = 64 << 20  # queued for a busy engine; beyond, messages are dropped
    l2: bool = True  # load and store KV blocks through a kv_tier of this host, where there is one
    l2_slots_bytes: Count = 64 << 20  # memory lent to it; loads and stores of 180 blocks of the
    # default model at once; touched only as far as it is needed
    l2_answer_s: AboveZero = 0.25  # a leg waits so long for its blocks, then it computes them
    l2_min_blocks: Natural = 8  # fewer missing blocks are computed; more, where L2 is measured to
    # be slower. 0 = always ask, whatever it costs
    l2_insure_ms: NotNegative = 250.0  # a leg is written to L2 once its ids take so long to compute
    # again: short ones are cheaper to resume than to write. 0 = write all
    l2_queue_blocks: Count = 4096  # wait to be written; beyond, the oldest are dropped
    l2_copy_bytes: Count = 8 << 20  # copied between two steps while legs run: 1 to 2 ms
    sim: SimConfig = SimConfig()

    def policy(self) -> KvPolicy:
        """What the `kv_*` mean."""
        if self.kv_policy == "full":
            return FULL
        sinks = self.kv_sinks if self.kv_policy == "sinks" else 0
        return KvPolicy.of(self.kv_window, sinks, self.max_batched_tokens)

    def __post_init__(self) -> None:
        if self.max_batched_tokens < self.max_legs:
            raise ValueError("max_batched_tokens must not be below max_legs: each leg decodes one")
        if (self.kv_policy == "full") != (self.kv_window == 0):
            raise ValueError("kv_window is for kv_policy window and sinks, which need one")
        if self.engine == "sim" and (self.kv_policy, self.kv_dtype) != ("full", "auto"):
            raise ValueError("kv_policy and kv_dtype are for a model; the simulated one has no KV")


class EngineLaunch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engine's one argument, as JSON. The descriptors are inherited."""

    instance: str
    model: str  # path; "" only with `engine = "sim"`
    config: WorkerConfig
    channel_fd: int
    page_fd: int
    parent_pid: int
