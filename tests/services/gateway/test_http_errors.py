"""What goes wrong over HTTP: failures, deadlines, clients that leave."""

import asyncio
from typing import Any

import openai
import pytest

from shared.testing import eventually
from tests.services.gateway.fake_mesh import Front

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_before_the_first_id_is_a_status(edge: Front, stream: bool) -> None:
    """A stream whose prefill fails was never a 200."""
    edge.mesh.script.fails = ("invalid_request", "id 70000 is not in the vocabulary")
    status, body, _ = await edge.post(PATH, {**CHAT, "stream": stream})

    assert status == 400
    assert body["error"] == {
        "message": "id 70000 is not in the vocabulary",
        "type": "invalid_request_error",
        "param": None,
        "code": None,
    }


async def test_an_error_in_the_middle_is_an_event(edge: Front, client: openai.AsyncOpenAI) -> None:
    """A stream that fails says so and then [DONE], never a finish; the official client raises."""
    edge.mesh.script.fails, edge.mesh.script.fails_after = ("internal", "NaN"), 2
    *chunks, error, done = await edge.events(PATH, CHAT)

    assert done == "[DONE]"
    assert error["error"]["type"] == "server_error"
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks)
    with pytest.raises(openai.APIError, match="NaN"):
        [_ async for _ in await client.chat.completions.create(**CHAT, stream=True)]


async def test_a_template_error_is_a_400(edge: Front) -> None:
    """What the tokenizer refuses is the client's fault."""
    edge.mesh.script.tokenizer_fails = ("invalid_request", "roles must alternate")
    status, body, _ = await edge.post(PATH, CHAT)

    assert (status, body["error"]["message"]) == (400, "roles must alternate")


@pytest.mark.parametrize(
    ("code", "status"), [("overloaded", 429), ("unavailable", 503), ("internal", 500)]
)
async def test_failures_have_their_status(edge: Front, code: Any, status: int) -> None:
    """Each kind of failure has its status; those worth a later try say when."""
    edge.mesh.script.fails = (code, "no")
    got, body, headers = await edge.post(PATH, CHAT)

    assert got == status
    assert body["error"]["message"] == "no"
    assert ("Retry-After" in headers) == (status != 500)


async def test_a_prompt_over_the_context(edge: Front, client: openai.AsyncOpenAI) -> None:
    """The message has the numbers that clients look for."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="x" * 5000, max_tokens=10)

    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in caught.value.message


async def test_unknown_things_are_404_in_shape(edge: Front, client: openai.AsyncOpenAI) -> None:
    """Unknown model, path and method come in OpenAI's shape."""
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-9", messages=CHAT["messages"])
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-9")
    status, body, _ = await edge.post("/v1/nothing", {})
    assert (status, body["error"]["type"]) == (404, "invalid_request_error")
    status, body, _ = await edge.post("/v1/models", {})
    assert (status, body["error"]["code"]) == (405, "method_not_allowed")


# --- deadlines and cancels ---


async def test_a_deadline_is_a_504(edge: Front) -> None:
    """A worker that gives no id, or a tokenizer that does not answer, is a typed 504."""
    edge.mesh.script.stuck_after = 0
    headers = {"X-Request-Timeout-Ms": "150"}
    status, body, _ = await edge.post(PATH, CHAT, headers)
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")

    edge.mesh.script.tokenizer_silent = True
    status, body, _ = await edge.post(PATH, {**CHAT, "stream": True}, headers)
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")


async def test_an_echo_takes_no_longer_than_the_request(edge: Front) -> None:
    """Text of the prompt that does not come in time is the same typed 504."""
    edge.mesh.script.tokenizer_silent = True
    status, body, _ = await edge.post(
        "/v1/completions",
        {"prompt": [[1], [2]], "echo": True, "max_tokens": 2},
        {"X-Request-Timeout-Ms": "150"},
    )
    assert (status, body["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_deadline_in_the_middle_is_an_event(edge: Front) -> None:
    """A stream past its deadline ends with the typed error, and is cancelled at the worker."""
    edge.mesh.script.stuck_after = 2
    async with edge.client() as client:
        stream = await client.chat.completions.create(
            **CHAT, stream=True, extra_headers={"X-Request-Timeout-Ms": "200"}
        )
        with pytest.raises(openai.APIError) as caught:
            [_ async for _ in stream]

    assert caught.value.code == "deadline_exceeded"
    await eventually(lambda: len(edge.mesh.cancelled) > 0)


@pytest.mark.parametrize("given", ["0", "-5", "soon", "1e3"])
async def test_a_bad_timeout_is_a_400(edge: Front, given: str) -> None:
    """A timeout is a positive number of milliseconds."""
    assert (await edge.post(PATH, CHAT, {"X-Request-Timeout-Ms": given}))[0] == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels(edge: Front, stream: bool) -> None:
    """Closing the connection cancels at once, whether or not an id has come."""
    edge.mesh.script.stuck_after = 1 if stream else 0
    request = asyncio.create_task(edge.post(PATH, {**CHAT, "stream": stream}))
    await eventually(lambda: len(edge.mesh.submitted) == 1)
    request.cancel()

    await eventually(lambda: len(edge.mesh.cancelled) >= 1, what="Cancel seen")
    assert edge.mesh.cancelled[0].request_id == edge.mesh.submitted[0].request_id
    await edge.quiet()
