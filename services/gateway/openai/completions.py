"""`POST /v1/completions`: the request, checked.

Source: OpenAI API reference, "Create completion (legacy)"; vLLM's extra fields where it has them.
"""

from typing import Any

from msgspec.structs import replace

from services.gateway.events import SessionSpec
from services.gateway.openai.request import (
    TOKENS_MAX,
    TOP_LOGPROBS_MAX,
    Caller,
    Checked,
    GenerateFields,
    includes_usage,
    integer,
    read_fields,
    session_spec,
)
from shared.errors import InvalidRequest

MAX_TOKENS = 16  # OpenAI's default


class CompletionFields(GenerateFields, kw_only=True):
    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None


def check_completion(
    body: bytes, caller: Caller, *, packed: bool = False, streams: bool = False
) -> Checked:
    """A completion request of `caller`; `streams` = whether to stream when the body does not say.

    Raises `InvalidRequest` that names the field, `NotFound` for another model.
    """
    fields = read_fields(body, CompletionFields, caller, packed=packed, streams=streams)
    if fields.suffix:
        raise InvalidRequest("'suffix' is not supported.", param="suffix")
    texts, ids = prompts(fields.prompt, caller.choices_max)
    echo = bool(fields.echo)
    asked = integer(fields.max_tokens, "max_tokens", MAX_TOKENS, 0 if echo else 1, TOKENS_MAX)
    max_tokens = max(asked, 1)  # an echo of the prompt alone runs one token and drops it
    spec = session_spec(fields, caller, len(texts or ids or []), max_tokens, _logprobs(fields))
    if echo and spec.sampling.logprobs is not None:
        spec = _with_prompt_logprobs(spec, spec.sampling.logprobs)
    return Checked(
        spec=replace(
            spec, texts=texts, ids=ids, add_special_tokens=fields.add_special_tokens is not False
        ),
        endpoint="completions",
        stream=bool(fields.stream),
        include_usage=includes_usage(fields),
        echo=echo,
        echo_only=asked == 0,
        prompt_logprobs=fields.prompt_logprobs,
    )


def _with_prompt_logprobs(spec: SessionSpec, count: int) -> SessionSpec:
    """The lists of `logprobs` begin with the echoed prompt, so its log probabilities are needed."""
    asked = spec.sampling.prompt_logprobs
    if asked is not None and asked >= count:
        return spec
    return replace(
        spec,
        sampling=replace(spec.sampling, prompt_logprobs=count),
        prompt_logprobs_field="logprobs",
    )


def _logprobs(fields: CompletionFields) -> int | None:
    if fields.logprobs is None:
        return None
    return integer(fields.logprobs, "logprobs", 0, 0, TOP_LOGPROBS_MAX)


def prompts(prompt: Any, count_max: int) -> tuple[list[str] | None, list[list[int]] | None]:
    """`prompt` as texts or as ids: a string, strings, ids, or lists of ids.

    Raises `InvalidRequest` for anything else, for an empty prompt and for too many.
    """
    if isinstance(prompt, str):
        prompt = [prompt]
    if not isinstance(prompt, list):
        raise InvalidRequest(
            "'prompt' must be a string, a list of strings, or token ids.", param="prompt"
        )
    if set(map(type, prompt)) == {int}:
        prompt = [prompt]
    if len(prompt) > count_max:
        raise InvalidRequest(f"'prompt' has more than {count_max} prompts.", param="prompt")
    if not prompt or not all(prompt):
        raise InvalidRequest("'prompt' must not be empty.", param="prompt")
    if set(map(type, prompt)) == {str}:
        return prompt, None
    for item in prompt:
        _check_ids(item)
    return None, prompt


def _check_ids(ids: Any) -> None:
    if not isinstance(ids, list) or set(map(type, ids)) != {int}:
        raise InvalidRequest(
            "'prompt' must be a string, a list of strings, or token ids.", param="prompt"
        )
    if not 0 <= min(ids) <= max(ids) < TOKENS_MAX:
        raise InvalidRequest("'prompt' holds a number that is not a token id.", param="prompt")
