"""`POST /tokenize` and `/detokenize`, as vLLM has them."""

from typing import Any

import msgspec
from msgspec import Struct

from services.gateway.openai.chat import ChatFields, chat_prompt
from services.gateway.openai.decode import decode
from services.gateway.openai.errors import UnknownModel
from services.gateway.openai.request import TOKENS_MAX
from shared.errors import InvalidRequest
from shared.messages import ChatPrompt

IDS_MAX = 1 << 20  # 4 MB on the bus


class TokenizeFields(Struct, kw_only=True):
    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Any = None


class DetokenizeFields(Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None


class Tokenizing(Struct, frozen=True, kw_only=True):
    """What is to become ids: a text, or a conversation."""

    text: str | None = None
    chat: ChatPrompt | None = None
    add_special_tokens: bool = True


def check_tokenize(body: bytes, model: str) -> Tokenizing:
    """The request of `/tokenize`; raises `InvalidRequest`, `NotFound`."""
    fields = decode(body, TokenizeFields)
    _check_model(fields.model, model)
    if (fields.prompt is None) == (fields.messages is None):
        raise InvalidRequest("Exactly one of 'prompt' and 'messages' is needed.", param="prompt")
    if fields.tools:
        raise InvalidRequest("'tools' is not supported.", param="tools")
    if fields.messages is not None:
        return Tokenizing(
            chat=chat_prompt(
                ChatFields(
                    messages=fields.messages,
                    add_generation_prompt=fields.add_generation_prompt,
                    continue_final_message=fields.continue_final_message,
                    chat_template_kwargs=fields.chat_template_kwargs,
                )
            )
        )
    return Tokenizing(text=fields.prompt, add_special_tokens=fields.add_special_tokens is not False)


def check_detokenize(body: bytes, model: str) -> list[int]:
    """The ids of `/detokenize`; raises `InvalidRequest`, `NotFound`."""
    fields = decode(body, DetokenizeFields)
    _check_model(fields.model, model)
    if len(fields.tokens) > IDS_MAX:
        raise InvalidRequest(f"'tokens' has more than {IDS_MAX} entries.", param="tokens")
    if fields.tokens and not 0 <= min(fields.tokens) <= max(fields.tokens) < TOKENS_MAX:
        raise InvalidRequest("'tokens' holds a number that is not a token id.", param="tokens")
    return fields.tokens


def tokenize_body(ids: list[int], max_model_len: int) -> bytes:
    return msgspec.json.encode(
        {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": None}
    )


def detokenize_body(text: str) -> bytes:
    return msgspec.json.encode({"prompt": text})


def _check_model(asked: str | None, served: str) -> None:
    if asked is not None and asked != served:
        raise UnknownModel(asked)
