"""`POST /v1/responses`: the request, checked. Text in, text out.

Source: OpenAI API reference, "Create a model response"; vLLM's extra sampling fields. What would
change the answer and is not served (tools, earlier responses, schemas) is refused by name.
"""

from typing import Any

from msgspec.structs import replace

from services.gateway.openai.chat import ChatFields, chat_prompt
from services.gateway.openai.decode import check_plain
from services.gateway.openai.request import (
    TOKENS_MAX,
    TOP_LOGPROBS_MAX,
    Caller,
    Checked,
    GenerateFields,
    integer,
    read_fields,
    refuse,
    session_spec,
)
from shared.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"
METADATA_MAX = 16  # pairs, keys of 64 and values of 512 characters: OpenAI's limits
ROLES = ("user", "assistant", "system", "developer")
PARTS = ("input_text", "output_text", "text")
NOT_SERVED = (
    "tools",
    "previous_response_id",
    "conversation",
    "prompt",
    "reasoning",
    "moderation",
    "n",
    "max_tokens",
    "prompt_logprobs",
)


class ResponsesFields(GenerateFields, kw_only=True):
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    background: bool | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    tool_choice: Any = None
    # refused by name
    tools: Any = None
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    reasoning: Any = None
    moderation: Any = None


def check_response(
    body: bytes, caller: Caller, *, packed: bool = False, streams: bool = False
) -> Checked:
    """A request of `caller`; `streams` = whether to stream when the body does not say.

    Raises `InvalidRequest` that names the field, `NotFound` for another model.
    """
    fields = read_fields(body, ResponsesFields, caller, packed=packed, streams=streams)
    refuse(fields, NOT_SERVED)
    _check_shape(fields)
    if fields.background and fields.store is False:
        raise InvalidRequest("'background' needs 'store'.", param="background")
    wanted = fields.max_output_tokens
    max_tokens = None if wanted is None else integer(wanted, "max_output_tokens", 0, 1, TOKENS_MAX)
    spec = session_spec(fields, caller, 1, max_tokens, _logprobs(fields))
    chat = chat_prompt(ChatFields(messages=_messages(fields)))
    return Checked(
        spec=replace(spec, chat=chat),
        endpoint="responses",
        stream=bool(fields.stream),
        store=fields.store is not False,
        background=bool(fields.background),
        instructions=fields.instructions,
        metadata=_metadata(fields.metadata or {}),
    )


def _check_shape(fields: ResponsesFields) -> None:
    shape = (fields.text or {}).get("format")
    if shape is not None and shape != {"type": "text"}:
        raise InvalidRequest("'text.format' other than text is not supported.", param="text.format")
    if fields.truncation not in (None, "disabled"):
        raise InvalidRequest(
            "'truncation' other than 'disabled' is not supported.", param="truncation"
        )
    if fields.tool_choice not in (None, "auto", "none"):
        raise InvalidRequest("'tool_choice' needs 'tools'.", param="tool_choice")


def _logprobs(fields: ResponsesFields) -> int | None:
    include = fields.include or []
    for name in include:
        if name != LOGPROBS:
            raise InvalidRequest(f"'include' does not know {name!r}.", param="include")
    if not include and fields.top_logprobs is None:
        return None
    return integer(fields.top_logprobs, "top_logprobs", 0, 0, TOP_LOGPROBS_MAX)


def _metadata(metadata: dict[str, str]) -> dict[str, str]:
    if len(metadata) > METADATA_MAX:
        raise InvalidRequest(f"'metadata' has more than {METADATA_MAX} pairs.", param="metadata")
    if any(len(key) > 64 or len(value) > 512 for key, value in metadata.items()):
        raise InvalidRequest(
            "'metadata' has a key over 64 or a value over 512 characters.", param="metadata"
        )
    return metadata


def _messages(fields: ResponsesFields) -> list[dict[str, Any]]:
    """The conversation, with `instructions` before everything else."""
    items = fields.input
    if isinstance(items, str):
        items = [{"role": "user", "content": items}]
    if not items:
        raise InvalidRequest("'input' must not be empty.", param="input")
    check_plain(items, "input")
    messages = [_message(item, f"input[{number}]") for number, item in enumerate(items)]
    if fields.instructions:
        messages.insert(0, {"role": "system", "content": fields.instructions})
    return messages


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind != "message":
        raise InvalidRequest(f"'{where}' of type {kind!r} is not supported.", param=where)
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"'{where}.role' must be one of {', '.join(ROLES)}.", param=f"{where}.role"
        )
    content = item.get("content")
    if not isinstance(content, list):
        content = [{"type": "input_text", "text": content}]
    texts = [_part(part, f"{where}.content[{number}]") for number, part in enumerate(content)]
    return {"role": role, "content": "\n".join(texts)}


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind not in PARTS:
        raise InvalidRequest(f"'{where}' must be a part of type 'input_text'.", param=where)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidRequest(f"'{where}.text' must be a string.", param=f"{where}.text")
    return text
