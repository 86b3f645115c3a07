"""What can never run here is refused before it is taken; the error names the field."""

from collections.abc import Collection
from itertools import chain

from services.gpu_worker.runner import ModelSpec
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.ids import unpack_ids
from shared.messages import Submit

PROMPT_LOGPROBS_MAX = 1 << 17
"""Logprobs of one prompt; as text at about 40 bytes each they fit one message of the bus."""

_SALT_MAX = 64  # bytes; blake2b takes no longer key


def ids_of(submit: Submit) -> tuple[list[int], list[int]]:
    """Prompt and output ids."""
    try:
        return unpack_ids(submit.prompt_ids), unpack_ids(submit.output_ids)
    except ValueError as error:
        raise InvalidRequest("ids are not packed u32", param="prompt") from error


def check(
    submit: Submit, prompt_ids: list[int], output_ids: list[int], spec: ModelSpec, max_len: int
) -> None:
    """Raise for what this model cannot run within `max_len` ids."""
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    _check_ids(submit, prompt_ids, output_ids, spec.vocab_size)
    if len(submit.salt) > _SALT_MAX:
        raise InvalidRequest(f"the salt is longer than {_SALT_MAX} bytes", param="cache_salt")
    sampling = submit.sampling
    if sampling.max_tokens <= len(output_ids):
        raise InvalidRequest("max_tokens leaves no id to generate", param="max_tokens")
    if len(prompt_ids) + len(output_ids) >= max_len:
        raise ContextLengthExceeded(
            f"the prompt has {len(prompt_ids)} ids; with the answer at most {max_len} fit",
            param="prompt",
        )
    if sampling.prompt_logprobs is not None:
        count = len(prompt_ids) * (1 + sampling.prompt_logprobs)
        if count > PROMPT_LOGPROBS_MAX:
            raise InvalidRequest(
                f"a prompt of {len(prompt_ids)} ids has {count} logprobs; at most "
                f"{PROMPT_LOGPROBS_MAX} are sent",
                param="prompt_logprobs",
            )


def _check_ids(
    submit: Submit, prompt_ids: list[int], output_ids: list[int], vocab_size: int
) -> None:
    """A model must not meet an id that it does not have."""
    sampling = submit.sampling
    if not all(sampling.bad_words):
        raise InvalidRequest("a bad word has no ids", param="bad_words")
    named: dict[str, Collection[int]] = {
        "prompt": prompt_ids + output_ids,
        "logit_bias": sampling.logit_bias,
        "bad_words": [*chain.from_iterable(sampling.bad_words)],
        "allowed_token_ids": sampling.allowed_token_ids,
    }
    for param, ids in named.items():
        if min(ids, default=0) < 0 or max(ids, default=0) >= vocab_size:
            raise InvalidRequest(f"token ids must be 0 to {vocab_size - 1}", param=param)
