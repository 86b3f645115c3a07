"""Requests of OpenAI's API, checked: what is refused, by which name, and what comes through."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.gateway.openai.chat import check_chat
from services.gateway.openai.completions import check_completion
from services.gateway.openai.errors import UnknownModel
from services.gateway.openai.request import Caller, Checked
from services.gateway.openai.tokens import check_detokenize, check_tokenize
from shared.errors import InvalidRequest
from shared.messages import ChatPrompt

CALLER = Caller(
    request_id="0" * 32,
    tenant="t",
    timeout_s=5.0,
    model="tiny",
    secret=b"s",
    choices_max=256,
)


def chat(*, packed: bool = False, **fields: Any) -> Checked:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], **fields}
    encode = msgspec.msgpack.encode if packed else msgspec.json.encode
    return check_chat(encode(body), CALLER, packed=packed)


def completion(**fields: Any) -> Checked:
    return check_completion(msgspec.json.encode({"prompt": "Hi", **fields}), CALLER)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else []


@pytest.mark.parametrize("check", [chat, completion])
@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", [-0.1, 2.1, "1", True]),
        ("top_p", [0, -1, 1.1]),
        ("top_k", [-2, 1.5]),
        ("min_p", [-0.1, 1.1]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0, -1]),
        ("n", [0, 129, -1, "2", 2.5]),
        ("max_tokens", [-1, 2**40]),
        ("min_tokens", [-1]),
        ("seed", [2**63, -(2**63) - 1, 2**80, 1.5]),
        ("stop", ["", [""], ["a", ""], ["x"] * 65, "x" * 5000, ["x" * 2049] * 2, 5]),
        ("stop_token_ids", [[-1], [2**31], ["a"], list(range(300))]),
        ("logit_bias", [{"-1": 1}, {"x": 1}, {"5": 101}, {"5": -101}, {str(2**31): 1}, [1]]),
        ("stream_options", [{"include_usage": True}]),
        ("response_format", [{"type": "json_object"}, {"type": "json_schema"}, {}, "text"]),
        ("guided_regex", ["a+"]),
        ("structured_outputs", [{"json": {}}]),
        ("prompt_logprobs", [-1, 21, 2**40, "1", True, 1.5]),
        ("use_beam_search", [True]),
        ("bad_words", ["x", [""], ["a", ""], [1], ["x"] * 257, ["x" * 2049, "y" * 2048]]),
        ("allowed_token_ids", [[], [-1], [2**31], [2**70], ["a"], [1.5], 1, [1] * 16385]),
        ("truncate_prompt_tokens", [-1]),
        ("best_of", [3]),
        ("priority", [1000]),
        ("cache_salt", ["", "x" * 300]),
        ("prompt_cache_retention", ["", "25h", 24]),
    ],
)
def test_a_bad_value_is_refused_by_name(check: Any, field: str, bad: list[Any]) -> None:
    """Every value out of range or of another type is a 400 whose `param` is the field."""
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            check(**{field: value})
        assert caught.value.param == field, value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": user(None)}, "messages[0].content"),
        ({"messages": user(5)}, "messages[0].content"),
        ({"messages": user([])}, "messages[0].content"),
        ({"messages": user(["x"])}, "messages[0].content[0].type"),
        ({"messages": user([{"type": "image_url"}])}, "messages[0].content[0].type"),
        ({"messages": user([{"type": "text", "text": 1}])}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "extra": deep(40)}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "extra": 2**70}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", "extra": [0] * 65_535}]}, "messages"),
        ({"messages": user([{"type": "text", "text": ""}] * 22_000)}, "messages"),
        ({"chat_template_kwargs": {"x": [0] * 65_536}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": deep(40)}}, "chat_template_kwargs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{}]}, "functions"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
def test_bad_chat_requests(fields: dict[str, Any], param: str) -> None:
    """What only a chat request can get wrong."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({"prompt": p}, "prompt") for p in ("", [], [""], ["a", ""], [[]], [[1], []], None, 5)],
        *[({"prompt": p}, "prompt") for p in ([-1], [2**31], [1.5], [True], [1, "a"], [[1], "a"])],
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 21, "echo": True}, "logprobs"),
        ({"prompt": ["a"] * 129, "n": 2}, "n"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"min_tokens": 17}, "min_tokens"),
    ],
)
def test_bad_completion_requests(fields: dict[str, Any], param: str) -> None:
    """What only a completion request can get wrong."""
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


def test_an_unknown_model_is_not_found() -> None:
    """A request is never answered by another model than the one named; none is the one served."""
    with pytest.raises(UnknownModel):
        chat(model="gpt-9")
    with pytest.raises(UnknownModel):
        completion(model="gpt-9")
    assert completion(model=None).spec.model == "tiny"


def test_unknown_fields_and_nulls_are_ignored() -> None:
    """Fields of other servers are accepted, and null reads as absent."""
    plain = chat()
    assert chat(user="u", store=False, metadata={"a": 1}, frobnicate=[1]) == plain
    nulls = dict.fromkeys(("temperature", "n", "stop", "tools", "seed", "logit_bias", "top_k"))
    assert chat(**nulls) == plain
    assert chat(tools=[], tool_choice="none", response_format={"type": "text"}) == plain


def test_what_comes_through() -> None:
    """Every sampling field reaches the session."""
    spec = chat(
        temperature=0.5,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"7": -100},
        seed=-1,
        stop=["a", "b"],
        stop_token_ids=[3],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        ignore_eos=True,
        min_tokens=2,
        max_tokens=9,
        max_completion_tokens=8,
        logprobs=True,
        top_logprobs=4,
        n=3,
        priority=-5,
        bad_words=["bad", "worse", "bad"],
        allowed_token_ids=[3, 2, 3],
        prompt_logprobs=5,
    ).spec

    sampling, text = spec.sampling, spec.text
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert (sampling.repetition_penalty, sampling.top_k) == (1.1, 0)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({7: -100}, (3,))
    assert (sampling.ignore_eos, sampling.min_tokens, sampling.logprobs) == (True, 2, 4)
    assert (sampling.allowed_token_ids, sampling.prompt_logprobs) == ((3, 2), 5)
    assert spec.bad_words == ["bad", "worse"]
    assert text.stop == ("a", "b")
    assert (text.include_stop_str, text.skip_special_tokens, text.min_tokens) == (True, False, 2)
    assert (spec.max_tokens, spec.n, spec.priority) == (8, 3, -5)
    assert spec.seed == 2**64 - 1
    assert spec.timeout_s == 5.0


def test_defaults() -> None:
    """Absent limits: a chat may fill the context, a completion gets OpenAI's 16 tokens."""
    assert chat().spec.max_tokens is None
    assert chat().spec.seed is None
    assert chat().spec.sampling.logprobs is None
    assert chat(logprobs=True).spec.sampling.logprobs == 0
    assert completion().spec.max_tokens == 16
    assert completion(logprobs=0).spec.sampling.logprobs == 0


@pytest.mark.parametrize("check", [chat, completion])
def test_what_is_said_is_not_left_to_the_model(check: Any) -> None:
    """A field is left open when it is absent or null; a value, even a usual one, closes it."""
    every = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
    assert set(check().spec.unsaid) == every
    assert set(check(temperature=None).spec.unsaid) == every
    said = {"temperature": 1, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}
    for name, value in said.items():
        assert set(check(**{name: value}).spec.unsaid) == every - {name}
    assert check(**said).spec.unsaid == ()


@pytest.mark.parametrize(
    ("fields", "count", "field"),
    [
        ({}, None, "prompt_logprobs"),
        ({"echo": True}, None, "prompt_logprobs"),
        ({"logprobs": 2}, None, "prompt_logprobs"),
        ({"echo": True, "logprobs": 0}, 0, "logprobs"),
        ({"echo": True, "logprobs": 2}, 2, "logprobs"),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 1}, 2, "logprobs"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": 2}, 2, "prompt_logprobs"),
    ],
)
def test_an_echo_with_logprobs_needs_those_of_the_prompt(
    fields: dict[str, Any], count: int | None, field: str
) -> None:
    """As many as the field that wants more, and that one is named when it is too many."""
    spec = completion(**fields).spec
    assert (spec.sampling.prompt_logprobs, spec.prompt_logprobs_field) == (count, field)


def test_messages_become_what_a_template_takes() -> None:
    """Parts are joined, an assistant's null is empty, `developer` is `system`, the rest stays."""
    call = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
    spec = chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "1", "tool_call_id": "c"},
        ],
    ).spec

    assert spec.chat is not None
    assert spec.chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    assert spec.chat.add_generation_prompt
    assert not spec.chat.continue_final_message


def test_continuing_a_message_adds_no_generation_prompt() -> None:
    """`continue_final_message` alone is enough."""
    prompt = chat(continue_final_message=True).spec.chat
    assert prompt is not None
    assert (prompt.continue_final_message, prompt.add_generation_prompt) == (True, False)


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("a", ["a"], None),
        (["a", "b"], ["a", "b"], None),
        ([1, 2], None, [[1, 2]]),
        ([0], None, [[0]]),
        ([[1], [2, 3]], None, [[1], [2, 3]]),
    ],
)
def test_the_four_forms_of_a_prompt(prompt: Any, texts: Any, ids: Any) -> None:
    """A string, strings, ids, lists of ids."""
    spec = completion(prompt=prompt).spec
    assert (spec.texts, spec.ids, spec.chat) == (texts, ids, None)


def test_tenants_and_cache_salts_do_not_share_blocks() -> None:
    """The root of block hashes differs by tenant and by `cache_salt`, and by nothing else."""
    other = msgspec.structs.replace(CALLER, tenant="u")
    body = msgspec.json.encode({"prompt": "Hi"})
    salts = {
        completion().spec.salt,
        completion(cache_salt="x").spec.salt,
        check_completion(body, other).spec.salt,
    }
    assert len(salts) == 3
    assert completion().spec.salt == completion(seed=5, prompt="other").spec.salt


def test_tenants_that_share_prefixes_have_one_salt_of_their_own() -> None:
    """Not that of any tenant, whatever its name; `cache_salt` goes on top."""
    body = msgspec.json.encode({"prompt": "Hi"})

    def salt_of(tenant: str, body: bytes = body, *, shared: bool = True) -> bytes:
        caller = msgspec.structs.replace(CALLER, tenant=tenant, shared_prefix=shared)
        return check_completion(body, caller).spec.salt

    salted = msgspec.json.encode({"prompt": "Hi", "cache_salt": "x"})
    assert salt_of("a") == salt_of("b")
    assert salt_of("a", salted) == salt_of("b", salted)
    assert len({salt_of("a"), salt_of("a", salted)}) == 2
    assert salt_of("a") not in {salt_of(name, shared=False) for name in ("", "a", "\xff", "None")}


@pytest.mark.parametrize(
    ("retention", "pin"), [(None, False), ("in_memory", False), ("in-memory", False), ("24h", True)]
)
@pytest.mark.parametrize("check", [chat, completion])
def test_a_prompt_that_is_to_stay_cached_is_pinned(
    check: Callable[..., Checked], retention: str | None, pin: bool
) -> None:
    """`prompt_cache_retention` as OpenAI has it."""
    assert check(prompt_cache_retention=retention).spec.pin is pin


def test_messagepack_is_the_same_request() -> None:
    """The packed form of a body, also with integer keys, reads as the JSON does."""
    for key in (7, "7"):
        assert chat(packed=True, n=2, logit_bias={key: 1.0}) == chat(n=2, logit_bias={"7": 1.0})
    for field, bad in (
        ("temperature", float("nan")),
        ("top_p", float("inf")),
        ("logit_bias", {1: float("nan")}),
        ("messages", user(b"bytes")),
    ):
        with pytest.raises(InvalidRequest):
            chat(packed=True, **{field: bad})


def test_tokenize_requests() -> None:
    """A text or a conversation, not both, not neither."""
    assert check_tokenize(b'{"prompt": ""}', "tiny").text == ""
    asked = check_tokenize(msgspec.json.encode({"messages": user("Hi")}), "tiny")
    assert asked.chat == ChatPrompt(messages=user("Hi"))
    for bad in (b"{}", b'{"prompt": "a", "messages": []}', b'{"messages": []}'):
        with pytest.raises(InvalidRequest):
            check_tokenize(bad, "tiny")
    with pytest.raises(UnknownModel):
        check_tokenize(b'{"prompt": "a", "model": "gpt-9"}', "tiny")
    assert check_detokenize(b'{"tokens": [1, 2]}', "tiny") == [1, 2]
    for bad in (b"{}", b'{"tokens": [-1]}', b'{"tokens": "a"}', b'{"tokens": [4294967296]}'):
        with pytest.raises(InvalidRequest):
            check_detokenize(bad, "tiny")


def test_a_field_that_is_missing_is_named() -> None:
    with pytest.raises(InvalidRequest) as of_tokens:
        check_detokenize(b"{}", "tiny")
    assert of_tokens.value.param == "tokens"
    with pytest.raises(InvalidRequest) as of_chat:
        check_chat(b'{"model": "tiny"}', CALLER)
    assert of_chat.value.param == "messages"
