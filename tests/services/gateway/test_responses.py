"""Responses: what is asked, and every event that comes back, by the official client's types."""

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from services.gateway.events import Delta, SessionEnd
from services.gateway.openai.request import Caller, Checked
from services.gateway.openai.response_events import ResponseWriter
from services.gateway.openai.responses import check_response
from services.gateway.stored.events import Adopted, Shown, Submitted
from shared.errors import Cancelled, InvalidRequest, MeshError, Unavailable
from shared.messages import TokenText

ID = "0" * 32
CALLER = Caller(
    request_id=ID, tenant="", timeout_s=60.0, model="m", secret=b"secret", choices_max=8
)
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
DONE = SessionEnd(None, 5, 3, 0)
TAKEN = Submitted(tenant="", endpoint="responses", body=b"{}", created=7.0, timeout_s=60.0)
BEGUN = Adopted(gateway="g")


def asked(**fields: Any) -> Checked:
    return check_response(json.dumps({"input": "Hi", **fields}).encode(), CALLER)


def read(events: list[bytes]) -> list[Any]:
    """Events as the client's types; the name before the data is that of the data."""
    parsed = []
    for event in events:
        head, data = event.decode().removesuffix("\n\n").split("\n")
        parsed.append(EVENT.validate_json(data.removeprefix("data: "), strict=True))
        assert head == f"event: {parsed[-1].type}"
    return parsed


def written(request: Checked, events: list[Shown]) -> list[bytes]:
    writer = ResponseWriter(request, created=7)
    return [frame for event in events for frame in writer.write(event)]


def played(request: Checked, deltas: list[Delta], end: SessionEnd) -> list[Any]:
    """What is written with a log; without one it is the same as soon as an id has come. The whole
    object is that of the last event.
    """
    logged: list[Shown] = [TAKEN, BEGUN, *deltas, end]
    frames = written(request, logged)
    if deltas:
        assert written(request, [*deltas, end]) == frames
    found = read(frames)
    assert [event.sequence_number for event in found] == [*range(len(found))]
    body = ResponseWriter(request, created=7).body(logged)
    assert Response.model_validate_json(body) == found[-1].response
    return found


def test_a_string_is_one_user_message() -> None:
    """And instructions go before it."""
    chat = asked(instructions="Be kind.").spec.chat
    assert chat is not None
    assert chat.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hi"},
    ]


def test_items_are_messages_of_text_parts() -> None:
    """Also what the API itself gave back as output of an earlier answer."""
    items = [
        {"role": "developer", "content": "a"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c"}], "id": "msg_1"},
    ]
    chat = asked(input=items).spec.chat
    assert chat is not None
    assert [(m["role"], m["content"]) for m in chat.messages] == [
        ("system", "a"),
        ("user", "b"),
        ("assistant", "c"),
    ]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"type": "function_call_output"}]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": None}]}, "input[0].content[0].text"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"text": {"format": "text"}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"n": 2}, "n"),
        ({"background": True, "store": False}, "background"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"stream_options": {}}, "stream_options"),
        ({"model": "other"}, "model"),
        ({"temperature": 3}, "temperature"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """Nothing that would change the answer is ignored."""
    with pytest.raises(MeshError) as refused:
        asked(**fields)
    assert refused.value.param == param
    assert refused.value.status in (400, 404)


def test_fields_of_ordinary_clients_pass() -> None:
    """What the official client and its helpers send by default is no reason to refuse."""
    asked(
        user="u", store=True, parallel_tool_calls=True, tools=[], tool_choice="auto",
        service_tier="auto", text={"format": {"type": "text"}}, truncation="disabled",
        stream=True, stream_options={"include_obfuscation": False}, metadata={"a": "b"},
    )  # fmt: skip


def test_a_stream_from_its_first_to_its_last_event() -> None:
    """The order that clients rely on, and the text three times the same."""
    found = played(asked(), [Delta(0, 0, [1], "He"), Delta(0, 1, [2, 3], "llo", "stop")], DONE)
    assert [event.type.removeprefix("response.") for event in found] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert found[-4].text == found[-1].response.output_text == "Hello"
    assert found[-1].response.usage.total_tokens == 8


def test_background_says_queued() -> None:
    assert played(asked(background=True), [], DONE)[1].type == "response.queued"


def test_an_answer_without_text_is_still_a_message() -> None:
    """A first id that ends the answer leaves an empty text."""
    response = played(asked(), [Delta(0, 0, [1], "", "stop")], DONE)[-1].response
    assert response.status == "completed"
    assert response.output[0].content[0].text == ""


def test_cut_by_the_limit_is_incomplete() -> None:
    response = played(asked(), [Delta(0, 0, [1], "x", "length")], DONE)[-1].response
    assert response.status == response.output[0].status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (Cancelled("c"), "cancelled", None),
        (Unavailable("u"), "failed", "server_error"),
        (InvalidRequest("i"), "failed", "invalid_prompt"),
    ],
)
def test_what_fails_keeps_what_it_said(error: MeshError, status: str, code: str | None) -> None:
    end = SessionEnd(error, 5, 1, 0)
    event = played(asked(), [Delta(0, 0, [1], "part")], end)[-1]
    assert event.type == "response.failed"
    assert event.response.status == status
    assert event.response.output_text == "part"
    assert (event.response.error and event.response.error.code) == code


def test_logprobs_ride_with_their_text() -> None:
    """One entry per token, also while the text is held back."""
    token = TokenText(-0.5, "a", b"a", [("a", b"a", -0.5), ("b", b"b", -1.0)])
    deltas = [Delta(0, 0, [1], "", logprobs=[token]), Delta(0, 1, [2], "aa", "stop", None, [token])]
    request = asked(include=["message.output_text.logprobs"], top_logprobs=2)
    found = played(request, deltas, DONE)
    assert [len(e.logprobs) for e in found if e.type == "response.output_text.delta"] == [1, 1]
    assert len(found[-1].response.output[0].content[0].logprobs) == 2


def test_another_gateway_that_reads_the_same_log_writes_the_same_stream() -> None:
    """An adoption is not shown."""
    delta = Delta(0, 0, [1], "x", "stop")
    background = asked(background=True)
    adopted = written(background, [TAKEN, BEGUN, BEGUN, delta, BEGUN, DONE])
    assert adopted == written(background, [TAKEN, BEGUN, delta, DONE])


def test_the_error_event_is_of_the_shape_that_clients_know() -> None:
    """It has the number of the event before it: a client that goes on from there misses nothing."""
    writer = ResponseWriter(asked(), created=7)
    before = read([*writer.write(TAKEN), *writer.write(BEGUN)])
    event = read([writer.broken(Unavailable("gone"))])[0]
    assert (event.type, event.message) == ("error", "gone")
    assert event.sequence_number == before[-1].sequence_number == 1
