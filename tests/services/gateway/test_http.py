"""OpenAI's contract over HTTP: a real server and the official client before real sessions."""

import asyncio
import os
import socket
from typing import Any

import aiohttp
import openai
import pytest

from services.gateway.config import KeyHolder
from shared.testing import eventually
from tests.services.gateway.fake_mesh import Front, front

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
PATH = "/v1/chat/completions"


async def test_a_whole_chat_answer(client: openai.AsyncOpenAI) -> None:
    """A whole answer has the text, one finish and the usage."""
    answer = await client.chat.completions.create(**CHAT)

    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hello, world!")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == 7
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_a_stream_is_the_whole_answer_in_pieces(client: openai.AsyncOpenAI) -> None:
    """Chunks share id, created and model, and their deltas are the whole text."""
    stream = await client.chat.completions.create(**CHAT, stream=True)
    chunks = [chunk async for chunk in stream]

    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "Hello, world!"


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_says_what_its_cache_leaves_out(edge: Front, streamed: bool) -> None:
    """In a header, while the workers leave anything out, and only then."""
    name = "X-Shoal-KV-Policy"
    for policy in ("sinks=16, window=64", ""):
        edge.mesh.script.kv_policy = policy
        await eventually(lambda: edge.gateway.edge.parts.table.leading.kv_policy == policy)  # noqa: B023
        async with (
            aiohttp.ClientSession() as session,
            session.post(edge.url + PATH, json={**CHAT, "stream": streamed}) as answer,
        ):
            assert answer.headers.get(name, "") == policy


async def test_the_shape_of_a_stream(edge: Front) -> None:
    """One role chunk per choice comes first, one finish per choice last, null before it, then
    usage over all choices, then [DONE]; `usage` is null until then.
    """
    body = {**CHAT, "n": 3, "stream_options": {"include_usage": True}}
    *chunks, last, done = await edge.events(PATH, body)

    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 15
    assert last["usage"]["prompt_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in chunks)
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert not any("role" in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + ["stop"]


async def test_no_usage_unless_asked(edge: Front) -> None:
    """Without `include_usage` no chunk has a usage and every chunk has a choice."""
    *chunks, done = await edge.events(PATH, CHAT)

    assert done == "[DONE]"
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


async def test_held_back_text_sends_no_chunk(edge: Front) -> None:
    """Ids without text are no chunk of their own; the role chunk goes with the first id."""
    edge.mesh.script.pieces = ["", "", "a", "", "b"]
    *chunks, _ = await edge.events(PATH, CHAT)

    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]


async def test_chat_logprobs(client: openai.AsyncOpenAI, edge: Front) -> None:
    """One entry per id with its raw bytes, also while its text is held back; streamed the same."""
    edge.mesh.script.pieces = ["", "é", "!"]
    asked = {**CHAT, "logprobs": True, "top_logprobs": 2}
    answer = await client.chat.completions.create(**asked)
    chunks = [c async for c in await client.chat.completions.create(**asked, stream=True)]

    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == ["", "é", "!"]
    assert content[1].bytes == [0xC3, 0xA9]
    assert [len(entry.top_logprobs) for entry in content] == [2, 2, 2]
    streamed = [
        entry
        for chunk in chunks
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == content


async def test_logprobs_alone_are_allowed_and_infinity_is_clamped(
    client: openai.AsyncOpenAI, edge: Front
) -> None:
    """`logprobs: true` needs no `top_logprobs`; JSON has no -inf, so it reads -9999."""
    edge.mesh.script.logprob = float("-inf")
    answer = await client.chat.completions.create(**CHAT, logprobs=True)

    assert answer.choices[0].logprobs is not None
    content = answer.choices[0].logprobs.content
    assert content is not None
    assert {entry.logprob for entry in content} == {-9999.0}
    assert all(entry.top_logprobs == [] for entry in content)


async def test_a_stop_reason_is_shown(client: openai.AsyncOpenAI, edge: Front) -> None:
    """The stop string that matched comes with the finish, whole and streamed."""
    edge.mesh.script.stop_reason = "##"
    answer = await client.chat.completions.create(**CHAT, stop=["##"])
    *_, last, _ = await edge.events(PATH, {**CHAT, "stop": "##"})

    assert answer.choices[0].model_dump()["stop_reason"] == "##"
    assert last["choices"][0]["stop_reason"] == "##"
    assert edge.mesh.submitted[0].text.stop == ("##",)


async def test_completions(client: openai.AsyncOpenAI) -> None:
    """A list of prompts x n answers that many choices in order."""
    answer = await client.completions.create(model="tiny", prompt=["ab", "cde"], n=2)

    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.choices[3].text == "Hello, world!#3"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5


async def test_completion_logprobs(client: openai.AsyncOpenAI) -> None:
    """Four parallel lists; offsets count characters and go on over the chunks of a stream."""
    answer = await client.completions.create(model="tiny", prompt="x", logprobs=1)
    stream = await client.completions.create(model="tiny", prompt="x", logprobs=1, stream=True)
    chunks = [chunk async for chunk in stream]

    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["Hel", "lo", ", ", "world", "!"]
    assert logprobs.text_offset == [0, 3, 5, 7, 12]
    assert logprobs.token_logprobs == [-0.5] * 5
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[0] == {"Hel0": -0.5, "Hel": -0.5}
    offsets = [
        offset
        for chunk in chunks
        if chunk.choices[0].logprobs
        for offset in chunk.choices[0].logprobs.text_offset or []
    ]
    assert offsets == logprobs.text_offset


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
async def test_echo_gives_the_prompt_back(
    client: openai.AsyncOpenAI, prompt: str | list[int]
) -> None:
    """The text of the prompt comes before the answer, also when it was given as ids."""
    answer = await client.completions.create(model="tiny", prompt=prompt, echo=True)
    stream = await client.completions.create(model="tiny", prompt=prompt, echo=True, stream=True)

    assert answer.choices[0].text == "abHello, world!"
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "abHello, world!"


async def test_echo_alone(client: openai.AsyncOpenAI) -> None:
    """`max_tokens: 0` with `echo` answers the prompt and nothing else."""
    answer = await client.completions.create(model="tiny", prompt="ab", echo=True, max_tokens=0)

    assert answer.choices[0].text == "ab"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


async def test_32_streams_at_once(client: openai.AsyncOpenAI, edge: Front) -> None:
    """Streams do not mix, and nothing is left of them."""

    async def one() -> str:
        stream = await client.chat.completions.create(**CHAT, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    edge.mesh.script.step_s = 0.001

    assert await asyncio.gather(*(one() for _ in range(32))) == ["Hello, world!"] * 32
    await edge.quiet()


# --- the rest of the surface ---


async def test_request_ids(edge: Front) -> None:
    """A sane X-Request-Id is echoed, also on errors; otherwise one is minted."""
    _, _, headers = await edge.post(PATH, CHAT, {"X-Request-Id": "abc-1"})
    assert headers["X-Request-Id"] == "abc-1"
    _, _, headers = await edge.post(PATH, {}, {"X-Request-Id": "x" * 500})
    assert len(headers["X-Request-Id"]) == 32


async def test_models(client: openai.AsyncOpenAI, edge: Front) -> None:
    """The one model is listed with what benchmark tools read."""
    (model,) = (await client.models.list()).data

    assert model.id == "tiny"
    assert model.model_dump()["root"] == "tiny"
    assert model.model_dump()["max_model_len"] == 4096
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_tokenize_and_back(edge: Front) -> None:
    """Ids of a text and of a conversation, and the text of ids."""
    status, body, _ = await edge.post("/tokenize", {"model": "tiny", "prompt": "ab"})
    assert (status, body["tokens"], body["count"]) == (200, [97, 98], 2)
    assert body["max_model_len"] == 4096
    _, body, _ = await edge.post("/tokenize", {"messages": CHAT["messages"]})
    assert body["tokens"] == [72, 105]
    _, body, _ = await edge.post("/detokenize", {"tokens": [72, 105]})
    assert body == {"prompt": "Hi"}
    edge.mesh.script.tokenizer_fails = ("invalid_request", "no such role")
    status, body, _ = await edge.post("/tokenize", {"messages": CHAT["messages"]})
    assert (status, body["error"]["message"]) == (400, "no such role")


async def test_metrics_count_a_request(edge: Front) -> None:
    """Counters move by what one request did; gauges are those of the beats."""

    async def read() -> dict[str, float]:
        _, text = await edge.get("/metrics")
        pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    own = '{gateway="gateway-0",model_name="tiny"}'
    before = await read()
    await edge.post(PATH, CHAT)
    after = await read()

    def moved(name: str, labels: str = own) -> float:
        return after[name + labels] - before.get(name + labels, 0.0)

    assert moved("vllm:prompt_tokens_total") == 2
    assert moved("vllm:generation_tokens_total") == 5
    assert moved("vllm:time_to_first_token_seconds_count") == 1
    assert moved("vllm:inter_token_latency_seconds_count") == 4
    assert moved("vllm:e2e_request_latency_seconds_count") == 1
    stop = '{finished_reason="stop",gateway="gateway-0",model_name="tiny"}'
    assert moved("vllm:request_success_total", stop) == 1
    ended = '{event="end_finished",gateway="gateway-0"}'
    assert moved("shoal:process_events_total", ended) == 1
    assert after['shoal:kv_blocks_total{model_name="tiny"}'] == 100
    assert after["shoal:sessions" + own] == 0
    attention = '{phase="attention",worker="worker-x"}'
    assert after["shoal:engine_phase_seconds_total" + attention] == 1.5


async def test_keys_guard_all_but_health() -> None:
    """With keys configured everything needs one, even what does not exist; tenants differ."""
    async with front(api_keys={"sk-a": "alice", "sk-b": "bob"}) as edge:
        for path in ("/v1/models", "/v1/nothing", "/"):
            assert (await edge.get(path))[0] == 401
        for path in ("/health", "/ready", "/metrics"):
            assert (await edge.get(path))[0] == 200
        status, body, _ = await edge.post(PATH, CHAT, {"Authorization": "Bearer sk-c"})
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        for key in ("sk-a", "sk-b"):
            async with edge.client(key) as client:
                await client.chat.completions.create(**CHAT)

        alice, bob = edge.mesh.submitted
        assert (alice.tenant, bob.tenant) == ("alice", "bob")
        assert alice.salt != bob.salt


async def test_keys_may_share_prefixes() -> None:
    """Whose keys say so has the salt of all that do; the tenant stays its own."""
    keys = {
        "sk-a": KeyHolder(tenant="alice", shared_prefix=True),
        "sk-b": KeyHolder(tenant="bob", shared_prefix=True),
        "sk-c": "carol",
    }
    async with front(api_keys=keys) as edge:
        for key in keys:
            headers = {"Authorization": f"Bearer {key}"}
            await edge.post(PATH, {**CHAT, "prompt_cache_retention": "24h"}, headers)

        alice, bob, carol = edge.mesh.submitted
        assert [leg.tenant for leg in (alice, bob, carol)] == ["alice", "bob", "carol"]
        assert alice.salt == bob.salt != carol.salt
        assert alice.pin


async def test_too_many_requests_are_refused() -> None:
    """Over the bound of open sessions a request is a 429 that says when to come back."""
    async with front(sessions_max=1) as edge:
        edge.mesh.script.stuck_after = 0
        first = asyncio.create_task(edge.post(PATH, CHAT))
        await eventually(lambda: edge.gateway.table.num_sessions == 1)
        status, _, headers = await edge.post(PATH, CHAT)
        edge.mesh.script.stuck_after = None

        assert status == 429
        assert headers["Retry-After"] == "1"
        assert (await first)[0] == 200


async def test_ready_says_what_is_missing(edge: Front) -> None:
    """`/ready` is 503 while a part is missing; `/health` only says that the process lives."""
    assert (await edge.get("/ready"))[0] == 200
    edge.gateway.edge.draining = True
    status, text = await edge.get("/ready")

    assert (status, (await edge.get("/health"))[0]) == (503, 200)
    assert "stopping" in text


async def test_a_drain_lets_streams_finish_and_tells_the_rest() -> None:
    """On SIGTERM a running stream may end; one that does not is told 503 in band."""
    async with front(drain_s=0.2) as edge:
        edge.mesh.script.stuck_after = 2
        events = asyncio.create_task(edge.events(PATH, CHAT))
        await eventually(lambda: 2 in edge.mesh.sent.values())
        edge.gateway.stop()
        *_, error, done = await events

    assert done == "[DONE]"
    assert error["error"]["code"] == "unavailable"


async def test_a_drain_serves_what_comes_on_open_connections() -> None:
    """A kept connection is good for one more answer, which closes it; new ones are not taken."""
    body = {**CHAT, "stream": False}
    async with front(drain_s=600.0) as edge, aiohttp.ClientSession() as session:
        edge.mesh.script.stuck_after = 2
        running = asyncio.create_task(edge.events(PATH, CHAT))
        await eventually(lambda: 2 in edge.mesh.sent.values())
        async with session.get(f"{edge.url}/health") as answer:
            assert answer.headers.get("Connection") != "close"
        edge.gateway.stop()
        await eventually(lambda: edge.gateway.edge.draining)
        edge.mesh.script.stuck_after = None
        async with session.post(edge.url + PATH, json=body) as answer:
            assert (answer.status, answer.headers["Connection"]) == (200, "close")
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{edge.url}/health")
        *_, last, done = await running
    assert (last["choices"][0]["finish_reason"], done) == ("stop", "[DONE]")


async def test_gateways_share_an_inherited_socket() -> None:
    """A gateway serves on the socket it is given; when it stops, another goes on there."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        async with front(listen_fd=os.dup(listening.fileno())) as first:
            assert first.port == port
            assert (await first.get("/health"))[0] == 200
        async with front(listen_fd=os.dup(listening.fileno())) as second:
            assert second.url == first.url
            assert (await second.get("/health"))[0] == 200
