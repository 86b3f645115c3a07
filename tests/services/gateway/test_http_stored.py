"""Responses and stored chats over HTTP: two gateways on a real JetStream, the official client."""

import asyncio
import json
from typing import Any

import openai
import pytest

from deploy.servers import Server
from shared.testing import eventually
from tests.services.gateway.fake_mesh import MODEL
from tests.services.gateway.pair import (
    ASK,
    CHAT,
    CHATS,
    RESPONSES,
    STORED,
    UNKNOWN,
    Clients,
    Pair,
    said,
    settled,
    sse,
    until_stuck,
)
from tests.services.gateway.stored.duo import TEXT, duo

# --- responses ---


@pytest.mark.parametrize("store", [True, False])
async def test_a_whole_response(pair: Pair, clients: Clients, store: bool) -> None:
    """The same shape, stored or not; only what is stored is there afterwards, at any gateway."""
    response = await clients[0].responses.create(
        **ASK, store=store, instructions="Be kind.", metadata={"a": "b"}, max_output_tokens=50
    )
    assert (response.status, response.output_text) == ("completed", TEXT)
    assert (response.instructions, response.metadata) == ("Be kind.", {"a": "b"})
    assert response.max_output_tokens == 50
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (10, 5)
    if store:
        assert await clients[1].responses.retrieve(response.id) == response
    else:
        with pytest.raises(openai.NotFoundError):
            await clients[0].responses.retrieve(response.id)


async def test_storing_is_the_default(clients: Clients) -> None:
    response = await clients[0].responses.create(**ASK)
    assert await clients[1].responses.retrieve(response.id) == response


@pytest.mark.parametrize("background", [True, False])
async def test_a_stream_is_the_same_whoever_writes_it_and_wherever_it_begins(
    pair: Pair, background: bool
) -> None:
    """Sequence numbers are 0..n-1; another gateway writes the same bytes, from any event on."""
    body = {**ASK, "stream": True, "background": background}
    _, first, headers = await pair.call(RESPONSES, body)
    assert headers["Content-Type"] == "text/event-stream; charset=utf-8"
    events = sse(first)
    assert [event["data"]["sequence_number"] for event in events] == [*range(len(events))]
    assert ("response.queued" in {event["event"] for event in events}) == background
    response = events[-1]["data"]["response"]
    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == TEXT
    path = f"{RESPONSES}/{response['id']}?stream=true"
    assert (await pair.call(path, number=1, method="GET"))[1] == first
    for number in range(len(events)):
        again = await pair.call(f"{path}&starting_after={number}", number=1, method="GET")
        assert sse(again[1]) == events[number + 1 :]


async def test_a_stream_that_is_not_stored_has_the_same_events(
    pair: Pair, clients: Clients
) -> None:
    """As a stored one, but for what names it."""
    kinds = [
        [event.type async for event in await clients[0].responses.create(**ASK, stream=True, **how)]
        for how in ({"store": True}, {"store": False})
    ]
    assert [*dict.fromkeys(kinds[0])] == [*dict.fromkeys(kinds[1])]


async def test_background_answers_at_once_and_is_polled(pair: Pair, clients: Clients) -> None:
    """Queued, then in progress with what there is of the text, then completed."""
    pair.script.stuck_after = 2
    response = await clients[0].responses.create(**ASK, background=True)
    assert (response.status, response.background, response.output) == ("queued", True, [])
    async with asyncio.timeout(20):
        while (now := await clients[1].responses.retrieve(response.id)).output_text != "Hello":
            assert now.status in ("queued", "in_progress")
    assert now.status == "in_progress"
    pair.script.stuck_after = None
    done = await settled(clients[1], response.id)
    assert (done.status, done.output_text) == ("completed", TEXT)


async def test_a_reader_follows_what_is_under_way(pair: Pair, clients: Clients) -> None:
    """From after the last event that it saw, on another gateway, to the end."""
    pair.script.stuck_after = 2
    stream = await clients[0].responses.create(**ASK, stream=True)
    seen = await until_stuck(stream)
    await stream.close()
    response_id = seen[0].response.id
    rest = await clients[1].responses.retrieve(
        response_id, stream=True, starting_after=seen[-1].sequence_number
    )
    pair.script.stuck_after = None
    seen += [event async for event in rest]
    assert [event.sequence_number for event in seen] == [*range(len(seen))]
    text = "".join(e.delta for e in seen if e.type == "response.output_text.delta")
    assert text == TEXT


async def test_a_cancel_ends_it_wherever_it_runs(pair: Pair, clients: Clients) -> None:
    """The object says so, its stream ends as failed, and cancelling twice is no mistake."""
    pair.script.stuck_after = 2
    stream = await clients[0].responses.create(**ASK, background=True, stream=True)
    response_id = (await until_stuck(stream))[0].response.id
    for client in reversed(clients):
        cancelled = await client.responses.cancel(response_id)
        assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hello")
    last = [event async for event in stream][-1]
    assert last.type == "response.failed"
    assert last.response.status == "cancelled"
    await eventually(lambda: len(pair.mesh.cancelled) > 0)


async def test_what_has_ended_cannot_be_cancelled(clients: Clients) -> None:
    response = await clients[0].responses.create(**ASK)
    with pytest.raises(openai.BadRequestError) as refused:
        await clients[1].responses.cancel(response.id)
    assert refused.value.type == "invalid_request_error"


async def test_a_whole_response_that_is_cancelled_says_so(pair: Pair, clients: Clients) -> None:
    """Whoever waits for it is given the object."""
    pair.script.stuck_after = 2
    headers = {"Idempotency-Key": "k"}
    waiting = asyncio.create_task(clients[0].responses.create(**ASK, extra_headers=headers))
    await eventually(lambda: 2 in pair.mesh.sent.values())
    request_id = pair.duo.gateways[1].edge.stored_id("", "k")
    await clients[1].responses.cancel(f"resp_{request_id}")
    assert (await waiting).status == "cancelled"


@pytest.mark.parametrize("running", [True, False])
async def test_deleted_is_forgotten(pair: Pair, clients: Clients, running: bool) -> None:
    """By every gateway, whether it had ended or not; who reads it is told."""
    pair.script.stuck_after = 2 if running else None
    stream = await clients[0].responses.create(**ASK, stream=True, background=True)
    first = await anext(aiter(stream))
    response_id = first.response.id  # type: ignore[union-attr]
    if not running:
        await settled(clients[0], response_id)
    status, body, _ = await pair.call(f"{RESPONSES}/{response_id}", number=1, method="DELETE")
    assert status == 200
    assert json.loads(body) == {"id": response_id, "object": "response", "deleted": True}
    async with asyncio.timeout(20):
        last = [event async for event in stream][-1]
    assert last.type in ("response.failed", "error" if running else "response.completed")
    for client in clients:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(response_id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(response_id)


async def test_what_fails_before_its_first_id_is_an_http_error(
    pair: Pair, clients: Clients
) -> None:
    """Whole or streamed; in the background the object and the stream say it."""
    pair.mesh.script.tokenizer_fails = ("context_length_exceeded", "too long")
    for stream in (True, False):
        with pytest.raises(openai.BadRequestError) as refused:
            await clients[0].responses.create(**ASK, stream=stream)
        assert refused.value.code == "context_length_exceeded"
    response = await clients[0].responses.create(**ASK, background=True)
    failed = await settled(clients[1], response.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert failed.error.message == "too long"


# --- who may see it ---


async def test_another_tenant_finds_nothing(nats_server: Server) -> None:
    """Not even with the right name; nor does the key of one name a request of the other."""
    async with duo(nats_server, STORED, api_keys={"ka": "a", "kb": "b"}) as running:
        pair = Pair(running)
        async with pair.client(0, "ka") as ours, pair.client(1, "kb") as theirs:
            key = {"Idempotency-Key": "k"}
            response = await ours.responses.create(**ASK, extra_headers=key)
            other = await theirs.responses.create(**ASK, extra_headers=key)
            assert other.id != response.id
            for call in (
                theirs.responses.retrieve(response.id),
                theirs.responses.retrieve(response.id, stream=True),
                theirs.responses.cancel(response.id),
                theirs.responses.delete(response.id),
            ):
                with pytest.raises(openai.NotFoundError) as refused:
                    await call
                assert refused.value.code == "not_found"
            assert (await ours.responses.retrieve(response.id)).output_text == TEXT


@pytest.mark.parametrize("name", [UNKNOWN, "resp_x", "x" * 5000, "resp_" + "0" * 31 + "%0A"])
@pytest.mark.parametrize(
    ("method", "suffix"),
    [("GET", ""), ("GET", "?stream=true"), ("POST", "/cancel"), ("DELETE", "")],
)
async def test_an_unknown_response_is_a_404(
    pair: Pair, name: str, method: str, suffix: str
) -> None:
    status, body, _ = await pair.call(f"{RESPONSES}/{name}{suffix}", method=method)
    assert (status, json.loads(body)["error"]["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=yes", "stream"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("stream=true&starting_after=" + "9" * 5000, "starting_after"),
        ("starting_after=1", "starting_after"),
    ],
)
async def test_a_bad_query_names_its_parameter(pair: Pair, query: str, param: str) -> None:
    status, body, _ = await pair.call(f"{RESPONSES}/{UNKNOWN}?{query}", method="GET")
    assert (status, json.loads(body)["error"]["param"]) == (400, param)


# --- idempotency ---


async def test_the_same_key_is_one_response(pair: Pair, clients: Clients) -> None:
    """Two at once at two gateways, and again after its end: one result, generated once; another
    body under the key is refused.
    """
    key = {"Idempotency-Key": "order-66"}
    asked = [client.responses.create(**ASK, extra_headers=key) for client in clients]
    first, second = await asyncio.gather(*asked)
    again = await clients[1].responses.create(**ASK, extra_headers=key)
    assert first == second == again
    assert len(pair.mesh.generated) == 1
    with pytest.raises(openai.UnprocessableEntityError) as refused:
        await clients[0].responses.create(model=MODEL, input="Other", extra_headers=key)
    assert refused.value.code == "idempotency_key_reused"


async def test_the_same_key_in_the_background_is_what_it_is_by_then(
    pair: Pair, clients: Clients
) -> None:
    """Asked again after its end, it is the finished object."""
    key = {"Idempotency-Key": "k"}
    response = await clients[0].responses.create(**ASK, background=True, extra_headers=key)
    done = await settled(clients[0], response.id)
    again = await clients[1].responses.create(**ASK, background=True, extra_headers=key)
    assert again == done


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHATS, CHAT),
        (RESPONSES, {**ASK, "store": False}),
        ("/v1/completions", {"prompt": "Hi"}),
    ],
)
async def test_a_key_is_honoured_or_refused(pair: Pair, path: str, body: dict[str, Any]) -> None:
    """A bad one, and one of a request that is not stored: a 400 that names the header."""
    for key in ("", "a b", "x" * 257, "k"):
        status, answer, _ = await pair.call(path, body, Idempotency_Key=key)
        assert (status, json.loads(answer)["error"]["param"]) == (400, "Idempotency-Key")
    assert pair.mesh.generated == []


# --- chats ---


async def test_a_stored_chat_goes_on_after_any_event(pair: Pair) -> None:
    """Every event has an id of its own; a reconnect with it, with the body or without, continues on
    another gateway with the same bytes.
    """
    body = {**CHAT, "n": 2, "store": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    _, first, _ = await pair.call(CHATS, body)
    events = sse(first)
    ids = [event["id"] for event in events]
    assert len({*ids}) == len(events) > 5
    assert all(event_id.startswith(events[0]["data"]["id"]) for event_id in ids)
    assert events[-1]["data"] == "[DONE]"
    for number, event_id in enumerate(ids):
        again = body if number % 2 else None
        status, rest, _ = await pair.call(CHATS, again, number=1, Last_Event_ID=event_id)
        assert status == 200
        assert sse(rest) == events[number + 1 :]


async def test_only_a_stored_chat_has_ids(pair: Pair) -> None:
    _, body, _ = await pair.call(CHATS, {**CHAT, "stream": True})
    assert b"\nid:" not in body
    assert said(sse(body)) == TEXT


async def test_a_whole_chat_may_be_stored(pair: Pair, clients: Clients) -> None:
    """So that its key is good at any gateway."""
    key = {"Idempotency-Key": "k"}
    one, two = [
        await client.chat.completions.create(**CHAT, store=True, extra_headers=key)
        for client in clients
    ]
    assert one == two
    assert one.choices[0].message.content == TEXT
    with pytest.raises(openai.NotFoundError):  # a chat is no response
        await clients[0].responses.retrieve("resp_" + one.id.removeprefix("chatcmpl-"))


@pytest.mark.parametrize(
    ("event_id", "status"),
    [
        ("", 400),
        ("7", 400),
        (f"chatcmpl-{'0' * 32}.", 400),
        (f"chatcmpl-{'0' * 32}.1", 404),
    ],
)
async def test_a_bad_last_event_id_is_answered(pair: Pair, event_id: str, status: int) -> None:
    found, body, _ = await pair.call(CHATS, Last_Event_ID=event_id)
    assert found == status
    assert json.loads(body)["error"]["param"] == ("Last-Event-ID" if status == 400 else None)
