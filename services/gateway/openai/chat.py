"""`POST /v1/chat/completions`: the request, checked.

Source: OpenAI API reference, "Create chat completion"; vLLM's extra fields where it has them.
"""

from typing import Any

from msgspec.structs import replace

from services.gateway.openai.decode import check_plain
from services.gateway.openai.request import (
    TOKENS_MAX,
    TOP_LOGPROBS_MAX,
    Caller,
    Checked,
    GenerateFields,
    includes_usage,
    integer,
    read_fields,
    refuse,
    session_spec,
)
from shared.errors import InvalidRequest
from shared.messages import ChatPrompt

MESSAGES_MAX = 4096
ROLES = {"system", "developer", "user", "assistant", "tool"}
NOT_SERVED = ("functions", "function_call", "audio", "web_search_options", "tools", "echo")


class ChatFields(GenerateFields, kw_only=True):
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    store: bool | None = None
    # refused by name
    tools: Any = None
    tool_choice: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: list[str] | None = None
    web_search_options: Any = None
    echo: Any = None


def check_chat(
    body: bytes, caller: Caller, *, packed: bool = False, streams: bool = False
) -> Checked:
    """A chat request of `caller`; `streams` = whether to stream when the body does not say.

    Raises `InvalidRequest` that names the field, `NotFound` for another model.
    """
    fields = read_fields(body, ChatFields, caller, packed=packed, streams=streams)
    _refuse_tools(fields)
    chat = chat_prompt(fields)
    spec = session_spec(fields, caller, 1, _max_tokens(fields), _logprobs(fields))
    return Checked(
        spec=replace(spec, chat=chat),
        endpoint="chat",
        stream=bool(fields.stream),
        include_usage=includes_usage(fields),
        prompt_logprobs=fields.prompt_logprobs,
        store=bool(fields.store),
    )


def _refuse_tools(fields: ChatFields) -> None:
    refuse(fields, NOT_SERVED)
    if fields.tool_choice is not None and fields.tools is None:
        raise InvalidRequest(
            "'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice"
        )
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise InvalidRequest("'modalities' other than text are not supported.", param="modalities")


def _max_tokens(fields: ChatFields) -> int | None:
    name = "max_completion_tokens"
    if fields.max_completion_tokens is None:
        name = "max_tokens"
    value: int | None = getattr(fields, name)
    return None if value is None else integer(value, name, 0, 1, TOKENS_MAX)


def _logprobs(fields: ChatFields) -> int | None:
    top = integer(fields.top_logprobs, "top_logprobs", 0, 0, TOP_LOGPROBS_MAX)
    if top and not fields.logprobs:
        raise InvalidRequest(
            "'top_logprobs' is only allowed when 'logprobs' is true.", param="top_logprobs"
        )
    return top if fields.logprobs else None


def chat_prompt(fields: ChatFields) -> ChatPrompt:
    """The conversation as a template takes it: the content of every message is one string."""
    if not fields.messages:
        raise InvalidRequest("'messages' must not be empty.", param="messages")
    if len(fields.messages) > MESSAGES_MAX:
        raise InvalidRequest(f"'messages' has more than {MESSAGES_MAX} entries.", param="messages")
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot both be true.",
            param="continue_final_message",
        )
    check_plain(fields.messages, "messages")
    template_kwargs = fields.chat_template_kwargs or {}
    check_plain(template_kwargs, "chat_template_kwargs")
    return ChatPrompt(
        messages=[_message(raw, f"messages[{i}]") for i, raw in enumerate(fields.messages)],
        add_generation_prompt=fields.add_generation_prompt is not False and not continues,
        continue_final_message=continues,
        template_kwargs=template_kwargs,
    )


def _message(raw: dict[str, Any], where: str) -> dict[str, Any]:
    role = raw.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(
            f"'{where}.role' must be one of {', '.join(sorted(ROLES))}.", param=f"{where}.role"
        )
    # `developer` is the newer name of `system`; templates of open models know the older one.
    return {
        **raw,
        "role": "system" if role == "developer" else role,
        "content": _content(raw.get("content"), role, f"{where}.content"),
    }


def _content(content: Any, role: str, where: str) -> str:
    """The text of a content: a string, text parts (joined by newlines), or an assistant's null."""
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if not isinstance(content, list) or not content:
        raise InvalidRequest(f"'{where}' must be a string or a list of parts.", param=where)
    texts: list[str] = []
    for number, part in enumerate(content):
        name = f"{where}[{number}]"
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise InvalidRequest(f"'{name}' must be a part of type 'text'.", param=f"{name}.type")
        text = part.get("text")
        if not isinstance(text, str):
            raise InvalidRequest(f"'{name}.text' must be a string.", param=f"{name}.text")
        texts.append(text)
    return "\n".join(texts)
