"""What a leg is to generate and when it ends: everything here is fixed when the session opens."""

from typing import Annotated

from msgspec import Meta, Struct


class SamplingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the worker chooses ids. Values are checked at the edge; cores assert them.

    `seed` is always drawn by the session (choice c uses hash(seed, c)), so that a resumed leg draws
    what it would have drawn: the generator is keyed by (seed, output position).
    """

    max_tokens: int  # output ids, all epochs together
    seed: int = 0  # unsigned 64 bits
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0  # output ids only
    frequency_penalty: float = 0.0  # output ids only
    repetition_penalty: float = 1.0  # prompt and output ids
    logit_bias: dict[int, float] = {}
    min_tokens: int = 0  # end ids are masked before this many output ids
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None = none, 0 = the chosen id only, k = and the k best
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last id of each may not follow the others
    allowed_token_ids: tuple[int, ...] = ()  # () = all
    prompt_logprobs: int | None = None  # like logprobs, of the prompt's ids


class SamplingDefaults(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a model's own files recommend where a request says nothing; None = no opinion.

    The names are those of `SamplingParams`, the ranges those of a request.
    """

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None


class TextParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How the detokenizer turns ids into text."""

    stop: tuple[str, ...] = ()
    include_stop_str: bool = False
    skip_special_tokens: bool = True
    min_tokens: int = 0  # stop strings do not count before this many output ids
