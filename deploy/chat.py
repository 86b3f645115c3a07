"""A small terminal client of the HTTP API, on the standard library alone."""

import contextlib
import http.client
import io
import json
import sys
from collections.abc import Iterator
from typing import Any

from deploy.errors import ClusterError

TIMEOUT_S = 120.0  # between two chunks; the gateway pings far more often
SAMPLE = "What is the capital of France?"
SAMPLE_TOKENS = 64
SAMPLE_S = 60.0
CHAT_TEMPERATURE = 0.2  # what the default model's card advises; at 1, the API's default, it rambles

Messages = list[dict[str, str]]


def sample(host: str, port: int, model: str) -> Iterator[str]:
    """The answer to a fixed question, short and soon, for a first look."""
    question = [{"role": "user", "content": SAMPLE}]
    return stream(
        host, port, model, question, max_tokens=SAMPLE_TOKENS, temperature=0, timeout_s=SAMPLE_S
    )


def stream(host: str, port: int, model: str, messages: Messages, **limits: float) -> Iterator[str]:
    """The pieces of one answer, as they come; raises `ClusterError`.

    `limits`: `max_tokens`, `temperature`, `timeout_s` of the whole answer.
    """
    body: dict[str, Any] = {"model": model, "messages": messages, "stream": True}
    headers = {"Content-Type": "application/json", "Authorization": "Bearer none"}
    if "timeout_s" in limits:
        headers["X-Request-Timeout-Ms"] = str(int(limits.pop("timeout_s") * 1000))
    body |= limits
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    with contextlib.closing(connection):
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise ClusterError(_reason(response.read(), response.status))
            yield from _pieces(response)
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"http://{host}:{port} broke off: {error!r}.") from error


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        chunk = json.loads(line[len(b"data: ") :])
        if "error" in chunk:
            raise ClusterError(chunk["error"]["message"])
        for choice in chunk.get("choices", ()):
            yield choice["delta"].get("content") or ""


def _reason(body: bytes, status: int) -> str:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"The gateway answered {status}."
    return str(message)


def say(pieces: Iterator[str]) -> str:
    """Write an answer to the terminal as it comes; the whole of it."""
    said = []
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
        said.append(piece)
    sys.stdout.write("\n")
    return "".join(said)


def converse(host: str, port: int, model: str) -> None:
    """Ask and answer until end of input. Ctrl-C ends an answer, a second one the conversation."""
    sys.stdout.write(f"{model} at http://{host}:{port}/v1. Ctrl-D ends.\n")
    history: Messages = []
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # a piped file need not be UTF-8
    while True:
        try:
            question = input("> ")
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return
        if not question.strip():
            continue
        history.append({"role": "user", "content": question})
        try:
            answer = say(stream(host, port, model, history, temperature=CHAT_TEMPERATURE))
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            history.pop()
        except ClusterError as error:
            sys.stdout.write(f"{error}\n")
            history.pop()
        else:
            history.append({"role": "assistant", "content": answer})
