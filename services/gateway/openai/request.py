"""What chat and completions requests have in common: fields, ranges, and what comes of them.

Ranges are OpenAI's where it has the field, vLLM's for the rest (`min_p`, `ignore_eos`, ...).
"""

from typing import Any, Literal, TypeVar

from msgspec import Struct

from services.gateway.events import SessionSpec
from services.gateway.openai.decode import decode
from services.gateway.openai.errors import UnknownModel
from shared.errors import InvalidRequest
from shared.kv import tenant_salt
from shared.sampling import SamplingDefaults, SamplingParams, TextParams

TOKENS_MAX = 2**31  # ids and counts of them
STOPS_MAX = 64
STOP_CHARS_MAX = 4096  # of all strings: 64 of them that long cost everybody 0.1 s a token
STOP_IDS_MAX = 256
BIASES_MAX = 4096
BAD_WORDS_MAX = 256
BAD_WORD_CHARS_MAX = 4096  # of all together: each is several sequences of ids for every step
ALLOWED_IDS_MAX = 16384  # 80 KB in every Submit of every choice
TOP_LOGPROBS_MAX = 20
CACHE_SALT_MAX = 256


class Caller(Struct, frozen=True, kw_only=True):
    """Who asks, and what this gateway allows."""

    request_id: str
    tenant: str
    timeout_s: float
    model: str  # the one served
    secret: bytes
    choices_max: int
    shared_prefix: bool = False  # cached prefixes are shared with other tenants that say so


class Checked(Struct, frozen=True, kw_only=True):
    """A request that may be opened, and how its answer is to be written."""

    spec: SessionSpec
    endpoint: Literal["chat", "completions", "responses"]
    stream: bool
    include_usage: bool = False
    echo: bool = False  # completions: the prompt comes before the answer
    echo_only: bool = False  # max_tokens 0: and nothing after it
    prompt_logprobs: int | None = None  # alternatives shown beside each id of the prompt
    store: bool = False  # it is to outlive the gateway that took it
    background: bool = False  # responses: nobody waits for it
    instructions: str | None = None  # responses: shown again in the answer, as are
    metadata: dict[str, str] = {}


class StreamOptions(Struct, frozen=True, kw_only=True):
    include_usage: bool | None = None


class GenerateFields(Struct, kw_only=True):
    """Fields of both endpoints; null reads as absent, as OpenAI does."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_cache_retention: str | None = None
    # they change the answer and are not served: refused by name, never ignored
    best_of: int | None = None
    use_beam_search: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    truncate_prompt_tokens: Any = None


F = TypeVar("F", bound=GenerateFields)

NOT_SERVED = (
    "use_beam_search",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "truncate_prompt_tokens",
)


def refuse(fields: Struct, names: tuple[str, ...]) -> None:
    """Refuse fields that would change the answer if they were served."""
    for name in names:
        value = getattr(fields, name)
        if value is not None and value is not False and value != []:
            raise InvalidRequest(f"'{name}' is not supported.", param=name)


def read_fields(body: bytes, kind: type[F], caller: Caller, *, packed: bool, streams: bool) -> F:
    """The request in `body`, less what every endpoint refuses, ranges aside; `streams` = whether to
    stream when the body does not say. Raises `InvalidRequest` that names the field, `NotFound` for
    another model.
    """
    fields = decode(body, kind, packed)
    fields.stream = streams if fields.stream is None else fields.stream
    _check_common(fields, caller)
    return fields


def _check_common(fields: GenerateFields, caller: Caller) -> None:
    if fields.model is not None and fields.model != caller.model:
        raise UnknownModel(fields.model)
    refuse(fields, NOT_SERVED)
    shape = fields.response_format
    if shape is not None and not (isinstance(shape, dict) and shape.get("type") == "text"):
        raise InvalidRequest(
            '\'response_format\' other than {"type": "text"} is not supported.',
            param="response_format",
        )
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        raise InvalidRequest("'best_of' other than 'n' is not supported.", param="best_of")
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest(
            "'stream_options' is only allowed when 'stream' is true.", param="stream_options"
        )


def session_spec(
    fields: GenerateFields,
    caller: Caller,
    prompts: int,
    max_tokens: int | None,
    logprobs: int | None,
) -> SessionSpec:
    """What both endpoints ask of a session; the input of its `prompts` is still to be set."""
    return SessionSpec(
        request_id=caller.request_id,
        model=caller.model,
        tenant=caller.tenant,
        n=choices(fields, prompts, caller),
        max_tokens=max_tokens,
        seed=seed(fields),
        sampling=sampling_params(fields, max_tokens, logprobs),
        unsaid=unsaid(fields),
        bad_words=bad_words(fields.bad_words or []),
        text=text_params(fields),
        priority=priority(fields),
        salt=salt(fields, caller),
        pin=pin(fields),
        timeout_s=caller.timeout_s,
    )


def number(
    value: float | None, name: str, default: float, low: float, high: float, open_low: bool = False
) -> float:
    """`value` if it lies in [low, high] ((low, high] with `open_low`); NaN lies nowhere."""
    if value is None:
        return default
    if not (low < value if open_low else low <= value) or not value <= high:
        bracket = "(" if open_low else "["
        raise InvalidRequest(
            f"'{name}' must be in {bracket}{low:g}, {high:g}], got {value}.", param=name
        )
    return value


def integer(value: int | None, name: str, default: int, low: int, high: int) -> int:
    """`value` if low <= value <= high."""
    if value is None:
        return default
    if not low <= value <= high:
        raise InvalidRequest(f"'{name}' must be between {low} and {high}, got {value}.", param=name)
    return value


def sampling_params(
    fields: GenerateFields, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Checked sampling parameters; `max_tokens` and `seed` are resolved by the session."""
    min_tokens = integer(fields.min_tokens, "min_tokens", 0, 0, TOKENS_MAX)
    if max_tokens is not None and min_tokens > max_tokens:
        raise InvalidRequest(
            f"'min_tokens' ({min_tokens}) must not be greater than the maximum ({max_tokens}).",
            param="min_tokens",
        )
    top_k = integer(fields.top_k, "top_k", 0, -1, TOKENS_MAX)
    return SamplingParams(
        max_tokens=max_tokens or 0,
        temperature=number(fields.temperature, "temperature", 1.0, 0.0, 2.0),
        top_k=max(top_k, 0),
        top_p=number(fields.top_p, "top_p", 1.0, 0.0, 1.0, open_low=True),
        min_p=number(fields.min_p, "min_p", 0.0, 0.0, 1.0),
        presence_penalty=number(fields.presence_penalty, "presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number(fields.frequency_penalty, "frequency_penalty", 0.0, -2.0, 2.0),
        repetition_penalty=number(
            fields.repetition_penalty, "repetition_penalty", 1.0, 0.0, 100.0, open_low=True
        ),
        logit_bias=logit_bias(fields.logit_bias or {}),
        min_tokens=min_tokens,
        stop_token_ids=token_ids(fields.stop_token_ids or [], "stop_token_ids", STOP_IDS_MAX),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        allowed_token_ids=allowed_token_ids(fields.allowed_token_ids),
        prompt_logprobs=prompt_logprobs(fields.prompt_logprobs),
    )


def unsaid(fields: GenerateFields) -> tuple[str, ...]:
    """Fields that are left to the model's own recommendation. A value that happens to be OpenAI's
    default is said, not left.
    """
    names = SamplingDefaults.__struct_fields__
    return tuple(name for name in names if getattr(fields, name) is None)


def bad_words(words: list[str]) -> list[str]:
    """Texts to avoid, each once; a tokenizer makes ids of them."""
    if len(words) > BAD_WORDS_MAX:
        raise InvalidRequest(f"'bad_words' has more than {BAD_WORDS_MAX} words.", param="bad_words")
    if not all(words):
        raise InvalidRequest("A word of 'bad_words' must not be empty.", param="bad_words")
    if sum(map(len, words)) > BAD_WORD_CHARS_MAX:
        raise InvalidRequest(
            f"'bad_words' has more than {BAD_WORD_CHARS_MAX} characters.", param="bad_words"
        )
    return list(dict.fromkeys(words))


def allowed_token_ids(ids: list[int] | None) -> tuple[int, ...]:
    """The only ids that may be output, each once; () = all. None at all could never answer."""
    if ids is None:
        return ()
    if not ids:
        raise InvalidRequest("'allowed_token_ids' must not be empty.", param="allowed_token_ids")
    name = "allowed_token_ids"
    return tuple(dict.fromkeys(token_ids(ids, name, ALLOWED_IDS_MAX)))


def prompt_logprobs(count: int | None) -> int | None:
    """How many alternatives are shown beside each id of the prompt; None = no prompt logprobs."""
    return None if count is None else integer(count, "prompt_logprobs", 0, 0, TOP_LOGPROBS_MAX)


def logit_bias(biases: dict[int, float]) -> dict[int, float]:
    """Ids are only known to be ids here; the vocabulary is the worker's."""
    if len(biases) > BIASES_MAX:
        raise InvalidRequest(
            f"'logit_bias' has more than {BIASES_MAX} entries.", param="logit_bias"
        )
    token_ids(list(biases), "logit_bias", BIASES_MAX)
    for value in biases.values():
        number(value, "logit_bias", 0.0, -100.0, 100.0)
    return biases


def token_ids(ids: list[int], name: str, count_max: int) -> tuple[int, ...]:
    """Ids that fit the wire; raises `InvalidRequest`."""
    if len(ids) > count_max:
        raise InvalidRequest(f"'{name}' has more than {count_max} entries.", param=name)
    if ids and not 0 <= min(ids) <= max(ids) < TOKENS_MAX:
        raise InvalidRequest(f"'{name}' holds a number that is not a token id.", param=name)
    return tuple(ids)


def text_params(fields: GenerateFields) -> TextParams:
    """Checked stop strings and how special tokens are shown."""
    stop = [fields.stop] if isinstance(fields.stop, str) else fields.stop or []
    if len(stop) > STOPS_MAX:
        raise InvalidRequest(f"'stop' has more than {STOPS_MAX} strings.", param="stop")
    if not all(stop):
        raise InvalidRequest("A string of 'stop' must not be empty.", param="stop")
    if sum(map(len, stop)) > STOP_CHARS_MAX:
        raise InvalidRequest(f"'stop' has more than {STOP_CHARS_MAX} characters.", param="stop")
    return TextParams(
        stop=tuple(stop),
        include_stop_str=bool(fields.include_stop_str_in_output),
        skip_special_tokens=fields.skip_special_tokens is not False,
        min_tokens=fields.min_tokens or 0,
    )


def choices(fields: GenerateFields, prompts: int, caller: Caller) -> int:
    """`n`, if n choices of each prompt are allowed."""
    n = integer(fields.n, "n", 1, 1, 128)
    if n * prompts > caller.choices_max:
        raise InvalidRequest(
            f"{prompts} prompts x n = {n} asks for more than {caller.choices_max} choices.",
            param="n" if n > 1 else "prompt",
        )
    return n


def seed(fields: GenerateFields) -> int | None:
    """A signed 64-bit seed as the unsigned one of the same bits."""
    if fields.seed is None:
        return None
    return integer(fields.seed, "seed", 0, -(2**63), 2**63 - 1) % 2**64


def salt(fields: GenerateFields, caller: Caller) -> bytes:
    """Root of the block hashes of this caller."""
    if fields.cache_salt is not None and not 0 < len(fields.cache_salt) <= CACHE_SALT_MAX:
        raise InvalidRequest(
            f"'cache_salt' must have 1 to {CACHE_SALT_MAX} characters.", param="cache_salt"
        )
    tenant = None if caller.shared_prefix else caller.tenant
    return tenant_salt(caller.secret, tenant, fields.cache_salt or "")


def pin(fields: GenerateFields) -> bool:
    """Whether the prompt is to stay cached for long; OpenAI's documents spell its default twice."""
    retention = fields.prompt_cache_retention
    if retention not in (None, "in_memory", "in-memory", "24h"):
        raise InvalidRequest(
            "'prompt_cache_retention' must be 'in_memory' or '24h'.",
            param="prompt_cache_retention",
        )
    return retention == "24h"


def priority(fields: GenerateFields) -> int:
    """Lower is earlier, as vLLM has it."""
    return integer(fields.priority, "priority", 0, -128, 127)


def includes_usage(fields: GenerateFields) -> bool:
    """Whether the stream ends with a usage chunk."""
    return bool(fields.stream_options and fields.stream_options.include_usage)
