"""A model's chat template: a sandbox, a limit of processor time, and errors that are the client's.

Templates come with the model, not with requests; they are sandboxed all the same. The limit covers
what is done to the client's strings as well. It is a signal on the process's own processor time,
raised inside the render: a child process per render would cost more than the whole request, and
cannot be kept warm without a second protocol.
"""

import contextlib
import datetime
import json
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import msgspec
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.tokenizer.shield import ControlTexts, Shield
from shared.errors import InvalidRequest
from shared.messages import ChatPrompt


class TemplateTooSlow(Exception):
    """The render used up its processor time."""


class ChatTemplate:
    """`source` compiled once; raises `jinja2.TemplateSyntaxError` if it is no template.

    `names` are the special tokens that a template may use by name, like `bos_token`.
    """

    def __init__(self, source: str, names: dict[str, str], cpu_s: float) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._source = source
        self._template = environment.from_string(source)
        self._names = names
        self._cpu_s = cpu_s

    def render(self, chat: ChatPrompt, control: ControlTexts) -> tuple[str, Shield]:
        """`chat` as hidden text, and the shield that reveals it. Raises `InvalidRequest`."""
        if not chat.messages:
            raise InvalidRequest("messages is empty", param="messages")
        try:
            with _cpu_limit(self._cpu_s):
                return self._render(chat, control)
        except InvalidRequest:
            raise
        except RecursionError:
            reason = "RecursionError: nested too deeply"
        except TemplateTooSlow:
            reason = f"took more than {self._cpu_s} s of processor time"
        except jinja2.TemplateError as error:
            reason = error.message or type(error).__name__
        except Exception as error:  # noqa: BLE001 a template meets data it was not written for
            reason = f"{type(error).__name__}: {error}"
        raise InvalidRequest(f"chat template: {reason}", param="messages")

    def _render(self, chat: ChatPrompt, control: ControlTexts) -> tuple[str, Shield]:
        messages = [_plain(message, n) for n, message in enumerate(chat.messages)]
        shield = Shield(control, [messages, chat.tools, chat.template_kwargs, self._source])
        hidden = shield.messages(messages)
        values = shield.data(chat.template_kwargs) | {"tools": shield.data(chat.tools)}
        if chat.continue_final_message:
            hidden[-1]["content"] += shield.mark
        values["messages"] = hidden
        values["add_generation_prompt"] = (
            chat.add_generation_prompt and not chat.continue_final_message
        )
        text = self._template.render(self._names | values)
        if chat.continue_final_message:
            text, mark, _ = text.rpartition(shield.mark)
            if not mark:
                raise InvalidRequest("the template leaves the last message out", param="messages")
        return text, shield


def _plain(message: Any, number: int) -> dict[str, Any]:
    """`message` with its content as one string: templates print what they get, None included."""
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} needs a role", param=where)
    content = message.get("content")
    kept = {key: value for key, value in message.items() if value is not None}
    if isinstance(content, list):
        kept["content"] = "\n".join(_part(part, f"{where}.content") for part in content)
    elif content is None or isinstance(content, str):
        kept["content"] = content or ""
    else:
        raise InvalidRequest(f"{where}.content must be text or parts", param=f"{where}.content")
    calls = kept.pop("tool_calls", [])
    if not isinstance(calls, list):
        where += ".tool_calls"
        raise InvalidRequest(f"{where} must be a list", param=where)
    if calls:  # templates take an empty list for a call
        kept["tool_calls"] = [_call(c, f"{where}.tool_calls[{n}]") for n, c in enumerate(calls)]
    return kept


def _call(call: Any, where: str) -> dict[str, Any]:
    """A call of a tool, its arguments as data: OpenAI's string of JSON would be printed as one."""
    if not isinstance(call, dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    kept = {key: value for key, value in call.items() if value is not None}
    if "function" not in kept:
        return kept
    where += ".function"
    if not isinstance(kept["function"], dict):
        raise InvalidRequest(f"{where} must be an object", param=where)
    function = {key: value for key, value in kept["function"].items() if value is not None}
    return kept | {"function": function | {"arguments": _arguments(function.get("arguments"))}}


def _arguments(written: Any) -> Any:
    """The object that a model wrote as JSON; what is none stays as it was written."""
    if not isinstance(written, str):
        return {} if written is None else written
    try:
        read = msgspec.json.decode(written or "{}")  # strict: no NaN, no half surrogate pairs
    except msgspec.DecodeError:
        return written
    return read if isinstance(read, dict) else written


def _part(part: Any, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(f"{where}: this model takes parts of type text only", param=where)
    return text


def _tojson(
    value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any
) -> str:
    """JSON as templates expect it: not escaped for HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().astimezone().strftime(pattern)


@contextlib.contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `TemplateTooSlow` in the body after so much processor time. Main thread only.

    Again every 50 ms, in case the first one is swallowed where Python ignores exceptions.
    """

    def expired(_number: int, _frame: FrameType | None) -> None:
        raise TemplateTooSlow

    before = signal.signal(signal.SIGVTALRM, expired)
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, seconds, 0.05)
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
