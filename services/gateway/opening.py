"""What a session fixes when it opens: everything that is not a function of ids. Pure.

A resumed leg, on whatever worker, samples by the same parameters as in its first epoch.
"""

import hashlib

from msgspec.structs import replace

from services.gateway.events import SessionSpec
from shared.errors import ContextLengthExceeded, InvalidRequest, MeshError, Unavailable
from shared.ids import count_ids, unpack_ids
from shared.messages import Tokenized
from shared.sampling import SamplingDefaults, SamplingParams

PROMPT_LOGPROBS_MAX = 1 << 16  # of a request; one takes up to 128 of the bus's 8 MB, also as JSON


def num_prompts(spec: SessionSpec) -> int:
    """How many prompts a tokenizer is to make of the input."""
    if spec.chat is not None:
        return 1
    return len(spec.texts if spec.texts is not None else spec.ids or [])


def sampling_of_choices(
    spec: SessionSpec, told: Tokenized, max_model_len: int, seed: int
) -> list[SamplingParams]:
    """One per choice, in order. Raises `InvalidRequest` for what cannot run, and `MeshError` when
    the tokenizer did not answer what it was asked.
    """
    sizes = [count_ids(prompt.prompt_ids) for prompt in told.prompts]
    if len(sizes) != num_prompts(spec):
        raise MeshError("the tokenizer answered for another number of prompts.")
    field_name = "messages" if spec.chat is not None else "prompt"
    if not all(sizes):
        raise InvalidRequest(f"{field_name} has no tokens.", param=field_name)
    limits = [_max_tokens(spec, size, max_model_len, field_name) for size in sizes]
    _check_prompt_logprobs(spec, sum(sizes))
    sampling = replace(
        spec.sampling, bad_words=_bad_words(spec, told), **_defaults(spec, told.sampling_defaults)
    )
    return [
        replace(
            sampling,
            max_tokens=limits[choice // spec.n],
            seed=choice_seed(seed, choice),
            prompt_logprobs=sampling.prompt_logprobs if _shows_prompt(spec, choice) else None,
        )
        for choice in range(len(sizes) * spec.n)
    ]


def choice_seed(seed: int, choice: int) -> int:
    """Unsigned 64 bits for one choice: choices differ, a resumed one draws as before."""
    key = f"{seed}:{choice}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _shows_prompt(spec: SessionSpec, choice: int) -> bool:
    """The choices of a chat have one prompt, and its answer shows it once."""
    return spec.chat is None or choice == 0


def _defaults(spec: SessionSpec, told: SamplingDefaults | None) -> dict[str, float]:
    """What the model's files recommend where the request says nothing. It comes with the ids: a
    gateway holds no model files, and the tokenizer speaks of the very model that it made ids for.
    """
    values = {name: getattr(told, name, None) for name in spec.unsaid}
    return {name: value for name, value in values.items() if value is not None}


def _bad_words(spec: SessionSpec, told: Tokenized) -> tuple[tuple[int, ...], ...]:
    if spec.bad_words and not told.bad_words:
        raise Unavailable("the tokenizer that answered knows no 'bad_words'.", retry_after_s=1.0)
    return tuple(tuple(unpack_ids(word)) for word in told.bad_words or [])


def _check_prompt_logprobs(spec: SessionSpec, num_prompt_ids: int) -> None:
    count = spec.sampling.prompt_logprobs
    if count is None:
        return
    shown = 1 if spec.chat is not None else spec.n
    total = num_prompt_ids * shown * (count + 1)
    if total > PROMPT_LOGPROBS_MAX:
        name = spec.prompt_logprobs_field
        raise InvalidRequest(
            f"'{name}' asks for {total} log probabilities of prompt tokens ({num_prompt_ids} tokens"
            f" x {shown} choices x {count + 1}); {PROMPT_LOGPROBS_MAX} are allowed.",
            param=name,
        )


def _max_tokens(spec: SessionSpec, prompt_tokens: int, max_model_len: int, field_name: str) -> int:
    wanted = spec.max_tokens
    if wanted is None and prompt_tokens < max_model_len:
        return max_model_len - prompt_tokens
    if wanted is not None and prompt_tokens + wanted <= max_model_len:
        return wanted
    head = f"This model's maximum context length is {max_model_len} tokens. However, "
    if wanted is None:
        raise ContextLengthExceeded(
            f"{head}your {field_name} resulted in {prompt_tokens} tokens. "
            f"Please reduce the length of the {field_name}.",
            param=field_name,
        )
    raise ContextLengthExceeded(
        f"{head}you requested {prompt_tokens + wanted} tokens "
        f"({prompt_tokens} in the {field_name}, {wanted} in the completion). "
        f"Please reduce the length of the {field_name} or completion.",
        param=field_name,
    )
