"""What passes between the edge (HTTP or bus) and a session."""

from collections.abc import Callable

from msgspec import Struct

from shared.errors import MeshError
from shared.messages import ChatPrompt, PromptToken, Tokenized, TokenText
from shared.sampling import SamplingParams, TextParams


class SessionSpec(Struct, frozen=True, kw_only=True):
    """A checked request. Exactly one of `chat`, `texts`, `ids` is set."""

    request_id: str
    model: str
    tenant: str = ""
    chat: ChatPrompt | None = None
    texts: list[str] | None = None
    ids: list[list[int]] | None = None
    add_special_tokens: bool = True
    n: int = 1
    max_tokens: int | None = None  # None = up to the model's context
    seed: int | None = None  # None = drawn when the session opens
    sampling: SamplingParams  # its max_tokens, seed and bad_words are resolved by the session
    unsaid: tuple[str, ...] = ()  # fields of `sampling` that the model's own defaults may set
    bad_words: list[str] = []  # not ids yet
    prompt_logprobs_field: str = "prompt_logprobs"  # which field of the request asked for them
    text: TextParams = TextParams()
    priority: int = 0
    salt: bytes = b""
    pin: bool = False  # the prompt is to stay cached
    timeout_s: float = 600.0


class Opening(Struct, frozen=True, kw_only=True):
    """The input is ids now. With this and its spec, whoever has a session's ids can go on with it:
    everything else is a function of these three.
    """

    tokenized: Tokenized
    seed: int
    max_model_len: int


class Resume(Struct, frozen=True, kw_only=True):
    """Where a session begins that another gateway may have run before."""

    epoch: int  # its epochs are above this one
    opening: Opening | None = None
    output_ids: dict[int, list[int]] = {}  # of each choice that has delivered any
    ended: frozenset[int] = frozenset()  # choices that have finished


class Delta(Struct, frozen=True):
    """New ids of one choice, exactly once, in order. `finish_reason` is set once per choice."""

    choice: int
    index: int
    ids: list[int]
    text: str
    finish_reason: str = ""
    stop_reason: str | int | None = None
    logprobs: list[TokenText] | None = None
    prompt_logprobs: list[PromptToken] | None = None  # with index 0


class SessionEnd(Struct, frozen=True):
    """The last event of every session. `error` None = every choice finished.

    `completion_tokens` counts ids delivered, all choices together.
    """

    error: MeshError | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


SessionEvent = Opening | Delta | SessionEnd
Emit = Callable[[SessionEvent], None]
"""Called synchronously by the session table; must only enqueue."""
