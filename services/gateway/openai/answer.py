"""Session events -> the JSON of OpenAI's answers: chunks of a stream, or one body.

The part of a chunk that never changes is serialised once per choice; a token costs one string
encoding and one concatenation.
"""

from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from services.gateway.events import Delta, SessionEnd
from services.gateway.openai.logprobs import CompletionLists, chat_logprobs, prompt_logprobs
from services.gateway.openai.request import Checked
from shared.messages import PromptToken, TokenText

_json = msgspec.json.Encoder()


class Answer(Protocol):
    """How one endpoint writes. A chunk is the JSON of one event of a stream."""

    def chunks(self, delta: Delta) -> list[bytes]:
        """Chunks for `delta`; none while its text is held back."""

    def usage_chunk(self, end: SessionEnd) -> bytes:
        """The last chunk, when `stream_options.include_usage` asks for it."""

    def add(self, delta: Delta) -> None:
        """Collect `delta` for `body`."""

    def body(self, end: SessionEnd) -> bytes:
        """The whole answer, from what was added."""


def answer(checked: Checked, created: int, echoes: list[str]) -> Answer:
    """The writer for `checked`; `echoes` = text of each prompt, if it is to be echoed."""
    if checked.endpoint == "chat":
        return ChatAnswer(checked, created)
    return CompletionAnswer(checked, created, echoes)


def usage(checked: Checked, end: SessionEnd) -> dict[str, Any]:
    """The `usage` object, over all choices."""
    completion_tokens = 0 if checked.echo_only else end.completion_tokens
    return {
        "prompt_tokens": end.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": end.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": end.cached_tokens},
    }


class Collected:
    """One choice of a whole answer, as it grows."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.logprobs: list[TokenText] = []
        self.prompt: list[PromptToken] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        self.texts.append(delta.text)
        self.logprobs += delta.logprobs or []
        self.prompt += delta.prompt_logprobs or []
        if delta.finish_reason:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def text(self) -> str:
        return "".join(self.texts)


class _Base:
    """Head and tail of every object of one answer."""

    def __init__(self, checked: Checked, prefix: str, created: int) -> None:
        self.checked = checked
        self.has_logprobs = checked.spec.sampling.logprobs is not None
        self.collected: dict[int, Collected] = {}
        self._id = f"{prefix}-{checked.spec.request_id}"
        self._created = created
        self._tail = b',"usage":null}' if checked.include_usage else b"}"
        self._heads: dict[int, bytes] = {}

    def add(self, delta: Delta) -> None:
        self.collected.setdefault(delta.choice, Collected()).add(delta)

    def _object(
        self, kind: str, choices: list[dict[str, Any]], end: SessionEnd, **more: Any
    ) -> bytes:
        return _json.encode(
            {
                "id": self._id,
                "object": kind,
                "created": self._created,
                "model": self.checked.spec.model,
                "choices": choices,
                "usage": usage(self.checked, end),
                **more,
            }
        )

    def _prompt(self, tokens: list[PromptToken] | None) -> dict[str, Any]:
        """The field of vLLM, for whoever asked for it by its name."""
        count = self.checked.prompt_logprobs
        if count is None or not tokens:
            return {}
        return {"prompt_logprobs": prompt_logprobs(tokens, count)}

    def _head(self, kind: str, choice: int) -> bytes:
        """A chunk up to and including the index of its only choice."""
        if choice not in self._heads:
            opened = _json.encode(
                {
                    "id": self._id,
                    "object": kind,
                    "created": self._created,
                    "model": self.checked.spec.model,
                }
            )
            self._heads[choice] = opened[:-1] + b',"choices":[{"index":%d' % choice
        return self._heads[choice]

    def _close(self, delta: Delta, logprobs: dict[str, Any] | None) -> bytes:
        """The rest of a chunk, after what was said."""
        if logprobs is None and not delta.finish_reason:
            return b',"logprobs":null,"finish_reason":null}]' + self._tail
        rest: dict[str, Any] = {
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason or None,
        }
        if delta.finish_reason:
            rest["stop_reason"] = delta.stop_reason
        return _fields(rest) + b"}]" + self._tail


def _fields(values: dict[str, Any]) -> bytes:
    """`values` as they go on in an object that has fields already."""
    return b"," + _json.encode(values)[1:-1] if values else b""


class ChatAnswer(_Base):
    """`chat.completion` and its chunks. A choice's first delta brings its role chunk."""

    def __init__(self, checked: Checked, created: int) -> None:
        super().__init__(checked, "chatcmpl", created)
        self._begun: set[int] = set()

    def chunks(self, delta: Delta) -> list[bytes]:
        head = self._head("chat.completion.chunk", delta.choice)
        chunks: list[bytes] = []
        if delta.choice not in self._begun:
            self._begun.add(delta.choice)
            said = b',"delta":{"role":"assistant","content":""},"logprobs":null'
            said += b',"finish_reason":null}]' + _fields(self._prompt(delta.prompt_logprobs))
            chunks.append(head + said + self._tail)
        logprobs = chat_logprobs(delta.logprobs) if delta.logprobs else None
        if delta.text or logprobs is not None:
            said = b',"delta":{"content":' + _json.encode(delta.text) + b"}"
        elif delta.finish_reason:
            said = b',"delta":{}'
        else:
            return chunks
        chunks.append(head + said + self._close(delta, logprobs))
        return chunks

    def usage_chunk(self, end: SessionEnd) -> bytes:
        return self._object("chat.completion.chunk", [], end)

    def body(self, end: SessionEnd) -> bytes:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": chat_logprobs(choice.logprobs) if self.has_logprobs else None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in sorted(self.collected.items())
        ]
        prompt = self._prompt(self.collected[0].prompt)  # one for all choices
        return self._object("chat.completion", choices, end, **prompt)


class CompletionAnswer(_Base):
    """`text_completion`, whole and in chunks, the prompt first if it is to be echoed."""

    def __init__(self, checked: Checked, created: int, echoes: list[str]) -> None:
        super().__init__(checked, "cmpl", created)
        self._echoes = echoes
        self._lists: dict[int, CompletionLists] = {}  # per choice

    def add(self, delta: Delta) -> None:
        super().add(self._own(delta))

    def chunks(self, delta: Delta) -> list[bytes]:
        delta = self._own(delta)
        text = self._echo(delta.choice) + delta.text if delta.index == 0 else delta.text
        logprobs = self._logprobs(delta.choice, delta.prompt_logprobs, delta.logprobs)
        prompt = self._prompt(delta.prompt_logprobs)
        if not text and logprobs is None and not prompt and not delta.finish_reason:
            return []
        head = self._head("text_completion", delta.choice)
        said = b',"text":' + _json.encode(text) + _fields(prompt)
        return [head + said + self._close(delta, logprobs)]

    def usage_chunk(self, end: SessionEnd) -> bytes:
        return self._object("text_completion", [], end)

    def body(self, end: SessionEnd) -> bytes:
        choices = [
            {
                "index": index,
                "text": self._echo(index) + choice.text,
                "logprobs": self._logprobs(index, choice.prompt, choice.logprobs),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
                **self._prompt(choice.prompt),
            }
            for index, choice in sorted(self.collected.items())
        ]
        return self._object("text_completion", choices, end)

    def _own(self, delta: Delta) -> Delta:
        """`delta` less the one token that is run for the sake of an echo, and not asked for."""
        if not self.checked.echo_only:
            return delta
        finish_reason = "length" if delta.finish_reason else ""
        return replace(delta, text="", logprobs=None, finish_reason=finish_reason, stop_reason=None)

    def _echo(self, choice: int) -> str:
        return self._echoes[choice // self.checked.spec.n] if self.checked.echo else ""

    def _logprobs(
        self, choice: int, prompt: list[PromptToken] | None, tokens: list[TokenText] | None
    ) -> dict[str, Any] | None:
        count = self.checked.spec.sampling.logprobs
        echoed = prompt if self.checked.echo else None
        if count is None or not (echoed or tokens):
            return None
        if choice not in self._lists:
            self._lists[choice] = CompletionLists(self._echo(choice), count)
        return self._lists[choice].take(echoed or [], tokens or [])
