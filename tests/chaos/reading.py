"""What answers look like, in whatever shape they come: errors, texts, log probabilities, events."""

from collections.abc import AsyncGenerator
from typing import Any

import aiohttp
import msgspec


class Refused(Exception):
    """An error of OpenAI's shape; `code` is "" if it has none."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def unwrap(data: bytes) -> dict[str, Any]:
    """The object in `data`; raises `Refused` for an error, also for what is no JSON."""
    try:
        body: dict[str, Any] = msgspec.json.decode(data)
    except msgspec.DecodeError:
        raise Refused("", f"not JSON: {data[:200]!r}") from None
    error = body.get("error")
    if error is not None:
        raise Refused(error.get("code") or error.get("type") or "", error.get("message", ""))
    return body


def text_of(choice: dict[str, Any]) -> str:
    """What a choice says, in whatever shape."""
    said = choice.get("delta") or choice.get("message") or {}
    text: str = choice.get("text") or said.get("content") or ""
    return text


def logprobs_of(choice: dict[str, Any]) -> tuple[float, ...] | None:
    """One number per token, in either shape; None when the answer has none."""
    given = choice.get("logprobs")
    if not given:
        return None
    if "content" in given:
        return tuple(token["logprob"] for token in given["content"])
    return tuple(given["token_logprobs"])


async def events(content: aiohttp.StreamReader) -> AsyncGenerator[tuple[str, bytes]]:
    """(id, data) of each server-sent event; the id is "" where there is none."""
    name = ""
    async for line in content:
        kind, _, value = line.rstrip(b"\r\n").partition(b": ")
        if kind == b"id":
            name = value.decode()
        elif kind == b"data":
            yield name, value
            name = ""


def chunk(text: str, finish: str = "") -> dict[str, Any]:
    """A piece of a response, as a completion would have it."""
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish or None}]}


def last_chunk(response: dict[str, Any], told: str) -> dict[str, Any]:
    """What a response that has ended adds to the text that was `told`. Raises `Refused` for one
    that failed.
    """
    if response["status"] not in ("completed", "incomplete"):
        failure = response["error"] or {"code": response["status"], "message": "no error is named"}
        raise Refused(failure["code"], failure["message"])
    finish = "stop" if response["status"] == "completed" else "length"
    used = response["usage"]
    usage = {"prompt_tokens": used["input_tokens"], "completion_tokens": used["output_tokens"]}
    return {**chunk(grown(response, told), finish), "usage": usage}


def grown(response: dict[str, Any], told: str) -> str:
    """The text behind what was `told`; all of it when that was another text: so it is seen."""
    parts = [part for item in response["output"] for part in item["content"]]
    text = "".join(part["text"] for part in parts)
    return text.removeprefix(told)
