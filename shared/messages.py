"""Every message on the wire, in the order in which a request meets them.

A *leg* is (`request_id`, `choice`); `choice` = prompt number x n + j. Every message about a leg
carries (`request_id`, `choice`, `epoch`), and whoever has seen a higher epoch of a leg drops it.
Token ids travel packed (`shared.ids`). Times travel as what remains, never as an instant.

Evolution is append-only: a new field has a default and goes last (array-like structs are read by
position). `tests/shared/test_messages.py` holds golden bytes of every message.
"""

from typing import Any, Literal

import msgspec
from msgspec import Struct

from shared.errors import Code
from shared.sampling import SamplingDefaults, SamplingParams, TextParams


class Message(
    Struct,
    frozen=True,
    tag=True,
    kw_only=True,
    omit_defaults=True,
    gc=False,
    forbid_unknown_fields=False,
):
    """Root of every message: a tagged map, unknown fields ignored."""


class Leg(Message, frozen=True, kw_only=True):
    """Root of every message about one leg."""

    request_id: str  # 32 hex digits, minted by the gateway
    choice: int
    epoch: int  # one epoch, one placement


# --- gateway <-> tokenizer ---------------------------------------------------------------------


class ChatPrompt(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation to be rendered by the model's chat template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, Any] = {}


class Generate(Message, frozen=True, kw_only=True):
    """gateway -> one live tokenizer: make ids of this input. A duplicate is answered again.

    Exactly one of `chat`, `texts`, `ids` is set. `attempt` is echoed, so that the answer of an
    earlier try is told from the current one (both are right: a tokenizer is a function).
    """

    request_id: str
    attempt: int
    gateway: str  # instance to answer
    chat: ChatPrompt | None = None
    texts: list[str] | None = None
    ids: list[bytes] | None = None
    add_special_tokens: bool = True
    salt: bytes = b""  # root of the block hashes (`shared.kv.tenant_salt`)
    deadline_ms: int = 0  # what remains
    bad_words: list[str] | None = None  # texts to avoid, to become `SamplingParams.bad_words`


class TokenizedPrompt(Struct, frozen=True, array_like=True, gc=False):
    """One prompt as ids, and the hashes of its full blocks (16 bytes each, in order)."""

    prompt_ids: bytes
    block_hashes: bytes = b""


class Tokenized(Message, frozen=True, kw_only=True):
    """tokenizer -> gateway: one entry per prompt, in the order asked. A duplicate is dropped."""

    request_id: str
    attempt: int
    tokenizer: str
    prompts: list[TokenizedPrompt]
    bad_words: list[bytes] | None = None  # packed ids of every way to write each text
    sampling_defaults: SamplingDefaults | None = None  # of the model that the ids are for


class Detokenize(Message, frozen=True, kw_only=True):
    """gateway -> tokenizer: the text of these ids (`POST /detokenize`). Answered each time."""

    request_id: str
    attempt: int
    gateway: str
    ids: bytes
    skip_special_tokens: bool = False


class Detokenized(Message, frozen=True, kw_only=True):
    """tokenizer -> gateway: answer to `Detokenize`. A duplicate is dropped."""

    request_id: str
    attempt: int
    tokenizer: str
    text: str


# --- gateway <-> scheduler ---------------------------------------------------------------------


class Submit(Leg, frozen=True, kw_only=True):
    """gateway -> the leading scheduler instance: place this leg. A re-drive is the same message
    with `output_ids` and `last_worker` filled. A bus duplicate is answered `Accepted` again.

    `prompt_ids` and `output_ids` stay apart: position = output index, remaining =
    `sampling.max_tokens` - number of output ids.
    """

    gateway: str
    model: str
    tenant: str
    prompt_ids: bytes
    sampling: SamplingParams
    text: TextParams = TextParams()
    output_ids: bytes = b""
    block_hashes: bytes = b""  # of the prompt's full blocks
    salt: bytes = b""
    priority: int = 0  # lower = earlier
    last_worker: str = ""
    alone: bool = False  # poison rule: run with no batch-mates
    deadline_ms: int = 0
    failed_worker: str = ""  # the leg failed there: any other one first
    pin: bool = False  # the prompt is to stay cached where it was computed


class Accepted(Leg, frozen=True, kw_only=True):
    """scheduler -> gateway: this epoch is queued or placed by me. A duplicate is dropped."""

    scheduler: str
    term: int


class NotLeader(Leg, frozen=True, kw_only=True):
    """scheduler -> gateway: I do not lead; the epoch was not taken. Only counted: its re-send, due
    anyway, goes to whoever leads by then.
    """

    scheduler: str
    term: int  # highest heard
    leader: str = ""  # who led when last heard


# --- scheduler -> worker -> everyone -----------------------------------------------------------


class Run(Message, frozen=True, kw_only=True):
    """scheduler -> one worker: run (or adopt) this leg. A duplicate epoch is ignored.

    Adopt: the worker runs this leg at a lower epoch, or finished it < 10 s ago, and its ids start
    with `submit.output_ids`: it takes the new epoch and detokenizer, re-sends from there, goes on.
    """

    submit: Submit
    scheduler: str
    term: int
    detokenizer: str


class Started(Leg, frozen=True, kw_only=True):
    """worker -> gateway: this epoch is mine now (counts as `Accepted`). A duplicate changes
    nothing.
    """

    worker: str
    detokenizer: str
    num_cached_tokens: int = 0
    adopted: bool = False


class TokenLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """Log probability of one chosen id, and the best ids at its position (best first)."""

    logprob: float
    top_ids: bytes = b""  # packed
    top_logprobs: tuple[float, ...] = ()


class PromptLogprobs(Struct, frozen=True, array_like=True, gc=False):
    """A whole prompt, and one entry of `logprobs` and `ranks` for each id but the first."""

    ids: bytes
    logprobs: list[TokenLogprobs]
    ranks: list[int]  # of the id itself at its position, 1 = the best


End = Literal["", "stop", "length"]
"""How the worker ended a leg at its last id: an end id, or max_tokens / the model's context."""


class TextContext(Struct, frozen=True, array_like=True, gc=False):
    """What a detokenizer needs to begin (or take up again) the text of a leg at any id.

    `output_ids` are replayed silently: their text was released before, or is held back again.
    """

    prompt_tail: bytes  # last 8 prompt ids
    output_ids: bytes
    text: TextParams
    logprobs: bool = False


class StepRecord(Struct, frozen=True, array_like=True, gc=False):
    """New ids of one leg. `context` is set first in an epoch and after > 2 s of silence.

    `prompt_logprobs`, where they were asked for, ride in every record of index 0.
    """

    request_id: str
    choice: int
    epoch: int
    gateway: str
    index: int  # output index of the first id
    ids: bytes
    end: End = ""
    logprobs: list[TokenLogprobs] | None = None
    context: TextContext | None = None
    prompt_logprobs: PromptLogprobs | None = None


class StepDone(Message, frozen=True, kw_only=True):
    """worker -> detokenizer, once per engine step: what the step produced.

    Told apart by (leg, epoch, index); a record that begins before what is known is cut or dropped,
    one that begins after it is a gap.
    """

    worker: str
    step: int
    records: list[StepRecord]


class EndedLeg(Struct, frozen=True, array_like=True, gc=False):
    """One leg that left a worker; `reason`: an `End`, cancelled, failed, reaped or moved."""

    request_id: str
    choice: int
    epoch: int
    reason: str
    output_tokens: int


class Ended(Message, frozen=True, kw_only=True):
    """worker -> scheduler, with the step that ended them. Lost = beats correct the load. A
    duplicate finds the leg gone.
    """

    worker: str
    legs: list[EndedLeg]


class TokenText(Struct, frozen=True, array_like=True, gc=False):
    """Log probability of one token as a client is shown it: its own text and raw bytes."""

    logprob: float
    token: str
    raw: bytes
    top: list[tuple[str, bytes, float]] = []  # token, raw, logprob; best first


class PromptToken(Struct, frozen=True, array_like=True, gc=False):
    """One id of a prompt as a client is shown it; the first has no `logprob`."""

    token_id: int
    token: str
    raw: bytes
    logprob: float | None = None
    rank: int = 0
    top: list[tuple[int, str, bytes, float]] = []  # id, token, raw, logprob; best first


class TextRecord(Struct, frozen=True, array_like=True, gc=False):
    """Ids of one leg, and the text that they release (maybe none, maybe that of earlier ids).

    `finish_reason` rides in the record of its id; ids after the finishing one are cut.
    """

    request_id: str
    choice: int
    epoch: int
    index: int  # output index of the first id
    ids: bytes
    text: str
    finish_reason: str = ""  # "", "stop", "length"
    stop_reason: str | int | None = None  # the stop string or stop id that matched
    logprobs: list[TokenText] | None = None  # one per id, even if its text is held back
    prompt_logprobs: list[PromptToken] | None = None  # one per prompt id, with index 0


class TextDelta(Message, frozen=True, kw_only=True):
    """detokenizer -> gateway, one per step and gateway. The session drops what it has delivered."""

    detokenizer: str
    records: list[TextRecord]


# --- ends, faults, questions -------------------------------------------------------------------


class Cancel(Leg, frozen=True, kw_only=True):
    """gateway (or a detokenizer that found a stop string) -> holder and scheduler: end all epochs
    up to this one and keep a tombstone. Lost = the lease runs out. Duplicates do nothing.
    """

    reason: str = "client"


class Failed(Leg, frozen=True, kw_only=True):
    """anyone -> session's gateway: this leg cannot go on here. From a tokenizer `choice` is -1 (the
    whole request) and `epoch` the attempt. Of another epoch than the leg's own it is dropped.

    `retryable` decides between re-drive (for a tokenizer: asking the next) and end. `started` = it
    happened after `Started`, so it counts as an attempt.
    """

    code: Code
    detail: str
    retryable: bool = False
    started: bool = False
    param: str | None = None
    retry_after_s: float | None = None


class RouteLost(Leg, frozen=True, kw_only=True):
    """scheduler, worker or detokenizer -> gateway: this epoch has lost its way; re-drive it. A
    duplicate finds a newer epoch and is dropped.

    `reason`: worker_lost, worker_hung or detokenizer_lost (scheduler), drain (worker or
    detokenizer), gap or unknown_leg (detokenizer).
    """

    reason: str
    term: int = 0  # of the scheduler that says so; 0 from others


class Lost(Message, frozen=True, kw_only=True):
    """leader -> every gateway: this instance is dead, or `hung` (silent or stuck, not known to have
    ended); re-drive the legs that name it. Said again by a new leader for 10 s; a leg that has
    moved on does not name it any more.
    """

    instance: str
    scheduler: str
    term: int
    hung: bool = False


class RenewLeg(Struct, frozen=True, array_like=True, gc=False):
    """One question of a `Renew`."""

    request_id: str
    choice: int
    epoch: int
    delivered: int


class Renew(Message, frozen=True, kw_only=True):
    """gateway -> holder (scheduler until `Started`, then the worker), once a second. It renews the
    holder's lease on each leg; lost ones are counted by who asks, duplicates answered again.
    """

    gateway: str
    legs: list[RenewLeg]


LegState = Literal["queued", "placed", "prefill", "decode", "paused", "done", "unknown"]


class RenewedLeg(Struct, frozen=True, array_like=True, gc=False):
    """One answer of a `Renewed`; `sent` = ids sent to the detokenizer so far (all epochs)."""

    request_id: str
    choice: int
    epoch: int
    state: LegState
    sent: int = 0
    worker: str = ""  # with `placed`
    detokenizer: str = ""


class Renewed(Message, frozen=True, kw_only=True):
    """holder -> gateway: the answer to a `Renew`. A repeated one changes nothing: `unknown` moves
    a leg once, and a lost tail takes two answers a renewal apart.
    """

    holder: str
    legs: list[RenewedLeg]


# --- liveness and leadership -------------------------------------------------------------------


class Beat(Message, frozen=True, kw_only=True):
    """everyone -> `subjects.beat(role, instance)`: alive; counters, no lists. An older `seq` than
    the last is ignored.

    Workers and detokenizers every 100 ms, others every 250 ms. `phase_age_ms` and `phase_bound_ms`
    describe what the worker's engine is in now; hung = `step` still while age > bound.
    """

    instance: str
    role: str
    seq: int
    ready: bool = True
    draining: bool = False
    term: int = 0  # highest scheduler term heard
    model: str = ""
    load: int = 0  # running legs, or requests in hand
    waiting: int = 0
    step: int = 0
    phase: str = ""
    phase_age_ms: int = 0
    phase_bound_ms: int = 0
    free_blocks: int = 0  # free or evictable
    total_blocks: int = 0
    block_size: int = 0
    max_legs: int = 0
    max_model_len: int = 0
    prefill_tokens_waiting: int = 0
    step_tokens: int = 0  # prefill budget of one step
    engine_seconds: dict[str, float] = {}  # of a worker, once a second: by phase since its start
    host: str = ""  # of a kv_tier: `shared.slots.host`; only workers there can lend it memory
    pid: int = 0  # of a kv_tier: its end frees what it was lent
    engine_counts: dict[str, int] = {}  # of a worker, once a second: some, since its start
    kv_policy: str = ""  # of a worker: what its cache leaves out of sight; "" = nothing
    leg_blocks_max: int = 0  # that a leg holds there under such a policy; 0 = as many as it needs


class Beacon(Message, frozen=True, kw_only=True):
    """leader -> `subjects.beacon(pool)` every 250 ms. A higher (term, scheduler) wins; after one
    that is `resigning` a standby leads at once. An older one of the same claim changes nothing.

    `max_model_len` and `workers` let gateways refuse early and answer `/ready`.
    """

    scheduler: str
    term: int
    pool: str
    model: str = ""
    workers: int = 0  # alive and ready
    max_model_len: int = 0
    queued: int = 0
    resigning: bool = False  # the last one of its sender
    kv_policy: str = ""  # see `Beat`


class Died(Message, frozen=True, kw_only=True):
    """supervisor (or a worker's I/O process for its engine) -> `subjects.DIED`: the pid is gone.
    Instances are never used twice, so a duplicate says nothing new.
    """

    instance: str
    reason: str


# --- worker <-> kv_tier ------------------------------------------------------------------------


class Lent(Struct, frozen=True, array_like=True, gc=False):
    """Memory of a worker's engine that a kv_tier of the same host may use slot by slot
    (`shared.slots`).
    """

    pid: int
    fd: int
    num_slots: int
    slot_bytes: int  # of payload: one KV block


class LookupBlocks(Message, frozen=True, kw_only=True):
    """worker -> kv_tier: how many of these blocks, from the first, are in L2? And if at least
    `min_blocks` are, put the first of them into `slots`, one each. Answered each time.
    """

    lookup_id: int  # also the generation of the slots
    worker: str
    block_hashes: bytes
    fingerprint: bytes = b""  # of what computes the blocks; others than its own are a miss
    lent: Lent | None = None
    slots: list[int] = []
    min_blocks: int = 0  # fewer are not worth their way
    deadline_ms: int = 0  # what remains; 0 = kv_tier's own limit


class BlocksFound(Message, frozen=True, kw_only=True):
    """kv_tier -> worker: the longest prefix found (0 = miss), and how many of it were checked and
    put into the first slots. Late or lost = a miss.
    """

    lookup_id: int
    kv_tier: str
    num_blocks: int
    num_loaded: int = 0


class StoreBlocks(Message, frozen=True, kw_only=True):
    """worker -> kv_tier: write these blocks, one per slot, to L2; and keep those of `used` for as
    long again. Nothing depends on it. Answered each time, when the slots are free.
    """

    store_id: int  # also the generation of the slots; never a `lookup_id` of the same worker
    worker: str
    block_hashes: bytes = b""
    fingerprint: bytes = b""
    lent: Lent | None = None
    slots: list[int] = []
    dtype: str = ""  # of the values in a block: bf16, fp32; what a codec must know
    used: bytes = b""  # hashes of blocks that running legs would need again


class BlocksStored(Message, frozen=True, kw_only=True):
    """kv_tier -> worker: answer to `StoreBlocks`; how many of its blocks, those of `used` included,
    L2 has now. A duplicate is dropped.
    """

    store_id: int
    kv_tier: str
    num_blocks: int


class ReturnSlots(Message, frozen=True, kw_only=True):
    """worker -> kv_tier: these answers are overdue; give back what you are not at work on. What was
    lost on the way would be lent for ever. A duplicate does nothing.
    """

    worker: str
    lent: Lent
    generations: list[int]
    slots: list[list[int]]  # of each generation


# --- worker -> scheduler: what L1 holds ----------------------------------------------------------


class BlocksChanged(Message, frozen=True, kw_only=True):
    """worker -> everyone("scheduler"): blocks that its L1 has gained and lost since the last `seq`.
    `whole` = an answer to `AskBlocks`: these are all. A gap of `seq` = ask.
    """

    worker: str
    seq: int
    added: bytes = b""  # the first `shared.kv.SHORT_SIZE` bytes of each hash
    removed: bytes = b""
    whole: bool = False


class AskBlocks(Message, frozen=True, kw_only=True):
    """scheduler -> worker: which blocks does your L1 hold? Answered each time, with
    `BlocksChanged`.
    """

    scheduler: str


# --- one union per mailbox ---------------------------------------------------------------------

ToTokenizer = Generate | Detokenize
ToScheduler = Submit | Cancel | Renew | Ended | Beat | Beacon | Died | BlocksChanged
ToWorker = Run | Cancel | Renew | Beacon | BlocksFound | BlocksStored | AskBlocks | Beat
ToDetokenizer = StepDone | Cancel
ToKvTier = LookupBlocks | StoreBlocks | ReturnSlots
ToGateway = (
    Tokenized
    | Detokenized
    | Accepted
    | NotLeader
    | Started
    | TextDelta
    | Failed
    | RouteLost
    | Lost
    | Renewed
    | Beacon
    | Beat
    | Died
)

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> bytes:
    """MessagePack bytes of `message`, tag included."""
    return _encoder.encode(message)
