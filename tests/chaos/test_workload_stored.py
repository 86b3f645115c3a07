"""Clients of stored requests come back until their answer has ended, and ask for what they miss."""

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from aiohttp import web

from shared.bus import Delivery
from shared.client import Client, Frame
from shared.subjects import JOBS, REPLAY
from shared.testing import MemoryBus
from tests.chaos import workload_stored
from tests.chaos.asks import Ask
from tests.chaos.history import History, Named, Numbered
from tests.chaos.reading import Refused
from tests.chaos.workload_stored import Door, StoredRequest

FOR_NOW = json.dumps({"error": {"message": "their store is full", "code": "unavailable"}})
USED = {"input_tokens": 3, "output_tokens": 2}


def response(status: str, text: str, **fields: Any) -> dict[str, Any]:
    output = [{"content": [{"text": text}]}] if text else []
    return {"id": "resp_1", "status": status, "error": None, "output": output, **fields}


ENDED = response("incomplete", "one two", usage=USED)
FAILED = response("failed", "one", error={"code": "server_error", "message": "no worker"})
CREATED = ("", {"type": "response.created", "response": response("queued", "")})
ONE = ("", {"type": "response.output_text.delta", "delta": "one"})
TWO = ("", {"type": "response.output_text.delta", "delta": " two"})
LAST = ("", {"type": "response.incomplete", "response": ENDED})
LEAVES = {"type": "error", "code": "unavailable", "message": "the gateway stops"}


class Answer(NamedTuple):
    """One connection's worth: events (id, data) from a number on, or a body; then it may break."""

    events: Sequence[tuple[str, Any]] = ()
    first: int = 0
    body: str = ""
    status: int = 200
    breaks: bool = False


def said(answer: Answer) -> bytes:
    """The bytes of it; events of responses are numbered here."""
    frames = []
    for number, (event_id, data) in enumerate(answer.events, answer.first):
        if isinstance(data, dict) and "type" in data:
            data = {"sequence_number": number, **data}
        text = data if isinstance(data, str) else json.dumps(data)
        frames.append((f"id: {event_id}\n" if event_id else "") + f"data: {text}\n\n")
    return ("".join(frames) or answer.body).encode()


class Bench:
    """A server that gives prepared answers, one per call, and what it was asked."""

    def __init__(self, history: History) -> None:
        self.bus = MemoryBus()
        self.answers: list[Answer] = []
        self.asked: list[str] = []
        self.keys: set[str | None] = set()
        self.url = ""
        self._history = history

    async def serve(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        last = request.headers.get("Last-Event-ID", "")
        self.asked.append(f"{request.method} {request.path_qs.removeprefix('/v1/')} {last}".strip())
        if request.method == "POST" and not last:
            self.keys.add(request.headers.get("Idempotency-Key"))
        answer = self.answers.pop(0)
        stream = web.StreamResponse(status=answer.status)
        await stream.prepare(request)
        await stream.write(said(answer))
        if answer.breaks and request.transport is not None:
            request.transport.abort()
        return stream

    async def text(self, way: str) -> str:
        """One request to its end: what it was told, "|" and how it finished."""
        ask = Ask("key", way, "responses", {"input": "x"})  # type: ignore[arg-type]
        door = Door(self.url, "m", Client(self.bus), self._history)
        texts, finish = [], ""
        async for chunk in StoredRequest(door, ask, "r", "k").chunks():
            for choice in chunk["choices"]:
                texts.append(choice["text"])
                finish = choice["finish_reason"] or finish
        return f"{''.join(texts)}|{finish}"

    @property
    def numbers(self) -> list[int]:
        return [line.number for line in self._history.lines if isinstance(line, Numbered)]

    @property
    def names(self) -> list[str]:
        return [line.name for line in self._history.lines if isinstance(line, Named)]


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with contextlib.AsyncExitStack() as stack:
        bench = Bench(stack.enter_context(History(tmp_path / "history.jsonl")))
        app = web.Application()
        app.add_routes([web.route("*", "/v1/{path:.*}", bench.serve)])
        runner = web.AppRunner(app)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        bench.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield bench


async def test_a_response_goes_on_after_the_last_event_that_was_seen(bench: Bench) -> None:
    """A connection that breaks, one that ends early, and a gateway that says that it leaves."""
    bench.answers = [
        Answer(breaks=True),
        Answer([CREATED, ONE], breaks=True),
        Answer(),
        Answer([TWO, ("", LEAVES)], first=2),
        Answer([LAST], first=3),
    ]
    assert await bench.text("response") == "one two|length"
    again = "GET responses/resp_1?stream=true&starting_after"
    assert bench.asked == ["POST responses"] * 2 + [f"{again}=1", f"{again}=1", f"{again}=2"]
    assert bench.numbers == [0, 1, 2, 3]
    assert bench.names == ["resp_1"]
    assert bench.keys == {"k"}


async def test_a_chat_goes_on_after_the_last_id(bench: Bench) -> None:
    """What has no id is of the gateway; `[DONE]` with an id is the end."""

    def events(first: int, *texts: str) -> list[tuple[str, Any]]:
        chunks = [
            {"choices": [{"text": text, "finish_reason": None, "index": 0}]} for text in texts
        ]
        return [(f"chatcmpl-1.{first + n}", chunk) for n, chunk in enumerate(chunks)]

    bench.answers = [
        Answer([*events(0, "one"), ("", LEAVES), ("", "[DONE]")]),
        Answer([*events(1, " two"), ("chatcmpl-1.2", "[DONE]")]),
    ]
    assert await bench.text("kept") == "one two|"
    assert bench.asked == ["POST chat/completions", "POST chat/completions chatcmpl-1.0"]
    assert (bench.numbers, bench.names) == ([0, 1, 2], ["chatcmpl-1"])


async def test_a_response_in_the_background_is_looked_at_until_it_has_ended(bench: Bench) -> None:
    bodies = [response("queued", ""), response("in_progress", "one"), ENDED]
    polls = [Answer(body=json.dumps(body)) for body in bodies]
    bench.answers = [Answer(breaks=True), polls[0], polls[0], Answer(breaks=True), *polls[1:]]
    assert await bench.text("polled") == "one two|length"
    assert bench.asked == ["POST responses"] * 2 + ["GET responses/resp_1"] * 4


async def test_a_whole_response_is_asked_for_under_its_key_until_it_comes(bench: Bench) -> None:
    """Also after a refusal for now."""
    whole = json.dumps(ENDED)
    bench.answers = [
        Answer(body=FOR_NOW, status=503),
        Answer(breaks=True),
        Answer(body=whole),
    ]
    assert await bench.text("keyed") == "one two|length"
    assert (bench.asked, bench.keys) == (["POST responses"] * 3, {"k"})


@pytest.mark.parametrize(
    ("way", "answers", "code"),
    [
        ("keyed", [Answer(body='{"error":{"code":"not_found"}}', status=404)], "not_found"),
        ("keyed", [Answer(body="<html>", status=503)], ""),
        ("keyed", [Answer(body=json.dumps(FAILED))], "server_error"),
        ("polled", [Answer(body=json.dumps(response("queued", ""))),
                    Answer(body=json.dumps(FAILED))], "server_error"),
        ("response", [Answer([("", {"type": "response.failed", "response": FAILED})])],
         "server_error"),
        ("kept", [Answer([("chatcmpl-1.0", json.loads(FOR_NOW))])], "unavailable"),
    ],
)  # fmt: skip
async def test_what_is_final_is_not_asked_for_again(
    bench: Bench, way: str, answers: list[Answer], code: str
) -> None:
    bench.answers = list(answers)
    with pytest.raises(Refused) as refused:
        await bench.text(way)
    assert (refused.value.code, bench.answers) == (code, [])


async def test_a_text_that_turns_out_to_be_another_is_told_whole(bench: Bench) -> None:
    """So that a checker sees it: what was told before was no beginning of it."""
    other = {**ENDED, "output": [{"content": [{"text": "uno due"}]}]}
    bench.answers = [
        Answer([CREATED, ONE, ("", {"type": "response.completed", "response": other})])
    ]
    assert await bench.text("response") == "oneuno due|length"


async def test_a_refusal_for_now_that_lasts_is_final(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload_stored, "REFUSED_S", 0.0)
    bench.answers = [Answer(body=FOR_NOW, status=503)]
    with pytest.raises(Refused, match="their store is full"):
        await bench.text("keyed")


async def test_a_job_is_handed_in_until_it_is_taken_and_followed_then(bench: Bench) -> None:
    """A refusal for now is an answer to wait after, not the end."""
    refused = Frame(request_id="j", index=0, event="error", data=json.loads(FOR_NOW))
    taken = Frame(request_id="j", index=0, event="job", data={"id": "j", "status": "queued"})
    said = [refused, taken]
    choice = {"index": 0, "text": "one", "finish_reason": "length"}
    keys = []

    def job(delivery: Delivery) -> None:
        keys.append(msgspec.msgpack.decode(delivery.payload)["idempotency_key"])
        bench.bus.publish(delivery.reply, msgspec.msgpack.encode(said.pop(0)))

    def replay(delivery: Delivery) -> None:
        for index, (event, data) in enumerate([("chunk", {"choices": [choice]}), ("done", None)]):
            frame = {"request_id": "j", "index": index, "event": event, "data": data}
            bench.bus.publish(delivery.reply, msgspec.msgpack.encode(frame))

    await bench.bus.subscribe(JOBS, job)
    await bench.bus.subscribe(REPLAY, replay)
    assert await bench.text("job") == "one|length"
    assert (keys, bench.names) == (["k", "k"], ["j"])
