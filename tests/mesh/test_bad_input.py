"""Bad input is answered, not suffered (P5): a clear error, and nothing else notices."""

import asyncio
import json
from typing import Any

import openai
import pytest

from tests.mesh.cluster import Mesh

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": ""}, "stop"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"49152": 1}}, "logit_bias"),
        ({"allowed_token_ids": [49152]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        (
            {"messages": [{"role": "user", "content": "a " * 4000}], "prompt_logprobs": 20},
            "prompt_logprobs",
        ),
        ({"max_tokens": 9000}, "messages"),
    ],
)
async def test_a_wrong_field_is_named(mesh: Mesh, change: dict[str, Any], param: str) -> None:
    """Each wrong field is a 400 in OpenAI's shape that names it."""
    status, body = await mesh.raw_post(
        "/v1/chat/completions", json.dumps({"model": mesh.model, **CHAT, **change}).encode()
    )

    assert status == 400, body
    error = json.loads(body)["error"]
    assert (error["param"] or "").startswith(param), error
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"model": "\xff\xfe"}', b'{"messages": 1} {}', b"[" * 100_000]
)
async def test_a_malformed_body_is_a_400(mesh: Mesh, body: bytes) -> None:
    """What is not a JSON object of UTF-8 is refused."""
    status, answer = await mesh.raw_post("/v1/chat/completions", body)

    assert status == 400
    assert json.loads(answer)["error"]["message"]


async def test_an_oversize_body_is_a_413(mesh: Mesh) -> None:
    """A body over the limit is refused before it is read."""
    status, answer = await mesh.raw_post("/v1/chat/completions", b" " * (9 << 20))

    assert status == 413
    assert json.loads(answer)["error"]["message"]


async def test_an_unknown_model_is_a_404(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    """No request is answered by another model than the one asked."""
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="gpt-9", messages=CHAT["messages"])

    assert caught.value.code == "model_not_found"


async def test_an_empty_prompt_is_a_400(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    """An empty prompt is refused and the worker lives on."""
    for prompt in ("", [], [""], [[]]):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=mesh.model, prompt=prompt)  # type: ignore[arg-type]


async def test_an_id_outside_the_vocabulary_is_a_400(
    mesh: Mesh, client: openai.AsyncOpenAI
) -> None:
    """Token ids are checked against the vocabulary."""
    for ids in ([49152], [-1]):
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=mesh.model, prompt=ids)


async def test_a_prompt_over_the_context_says_by_how_much(
    mesh: Mesh, client: openai.AsyncOpenAI
) -> None:
    """A prompt longer than the context is refused with the numbers clients look for."""
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model=mesh.model, prompt="word " * 9000, max_tokens=5)

    assert caught.value.code == "context_length_exceeded"
    assert "maximum context length is 8192 tokens" in caught.value.message


async def test_invalid_utf8_in_content_is_a_400(mesh: Mesh) -> None:
    """A lone surrogate has no UTF-8 form and is refused."""
    body = b'{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 2}'
    status, answer = await mesh.raw_post("/v1/chat/completions", body)

    assert status == 400, answer


async def test_headers_that_drip_are_cut(mesh: Mesh) -> None:
    """A client that never finishes its headers loses its connection."""
    reader, writer = await asyncio.open_connection(mesh.host, mesh.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
    await writer.drain()

    assert await reader.read() == b""  # the test's own timeout is the bound
    writer.close()


async def test_a_body_that_stalls_is_a_408(mesh: Mesh) -> None:
    """A client that never finishes its body is told so and cut."""
    reader, writer = await asyncio.open_connection(mesh.host, mesh.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{")
    await writer.drain()

    assert b" 408 " in await reader.readline()
    writer.close()


async def test_after_all_that_the_mesh_answers(mesh: Mesh, client: openai.AsyncOpenAI) -> None:
    """Bad requests leave the mesh as it was: no restart, nothing running."""
    answer = await client.chat.completions.create(model=mesh.model, **CHAT)

    assert answer.choices[0].finish_reason
    assert mesh.restarts() == 0
    await mesh.quiet()
