"""Log probabilities of a prompt: asked for once, delivered once, shown as OpenAI and vLLM do."""

import json
from itertools import pairwise
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.events import Delta, SessionEnd
from services.gateway.openai.answer import answer
from services.gateway.openai.completions import check_completion
from services.gateway.openai.logprobs import CompletionLists, prompt_logprobs, prompt_offsets
from services.gateway.openai.request import Caller
from shared.ids import pack_ids
from shared.messages import PromptToken, TextDelta, TextRecord, TokenText
from shared.sampling import SamplingParams
from shared.testing import eventually
from tests.services.gateway.fake_mesh import Front, front
from tests.services.gateway.session_rig import R, Rig

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
SHOWN = [
    None,
    {
        "105": {"logprob": -0.5, "rank": 7, "decoded_token": "i"},
        "106": {"logprob": -2.0, "rank": 1, "decoded_token": "j"},
    },
]


# --- exactly once ---

PROMPT = [PromptToken(7, "a", b"a"), PromptToken(8, "b", b"b", -1.0, 1)]


class Asked(Rig):
    """A session whose one leg was asked for the log probabilities of its prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.open(sampling=SamplingParams(max_tokens=0, prompt_logprobs=0))
        self.tokenize()
        self.start()
        self.sent()

    def record(self, epoch: int, index: int, prompt: list[PromptToken] | None) -> None:
        text = TextRecord(R, 0, epoch, index, pack_ids([index]), "x", prompt_logprobs=prompt)
        self.say(TextDelta(detokenizer="d0", records=[text]))

    def prompts(self) -> list[list[PromptToken] | None]:
        return [event.prompt_logprobs for event in self.events if isinstance(event, Delta)]


def test_they_come_with_the_first_id_however_often_it_is_sent() -> None:
    """A leg that moves before its first id brings them once, a duplicate adds nothing."""
    rig = Asked()
    rig.record(1, 1, None)  # the first record was lost
    assert rig.resubmitted().output_ids == b""
    rig.record(1, 0, PROMPT)  # late, of the old epoch
    rig.record(2, 0, PROMPT)
    rig.record(2, 0, PROMPT)
    rig.record(2, 1, None)
    assert (rig.prompts(), rig.ids()) == ([PROMPT, None], [0, 1])


def test_they_are_not_asked_for_again_after_the_first_id() -> None:
    """A leg that moves later goes on without them, and the session does not miss them."""
    rig = Asked()
    rig.record(1, 0, PROMPT)
    rig.record(1, 2, None)
    assert rig.resubmitted().output_ids == pack_ids([0])
    rig.record(2, 1, None)
    assert (rig.prompts(), rig.ids()) == ([PROMPT, None], [0, 1])


def test_a_first_id_without_them_is_an_error() -> None:
    """Whoever evaluates a model must not take what is absent for what is unlikely."""
    rig = Asked()
    rig.record(1, 0, None)
    assert rig.error_code() == "internal"
    assert rig.ids() == []


# --- as shown ---


async def test_a_chat_shows_them_beside_its_choices(edge: Front) -> None:
    """Null first, then by id the token itself and its alternatives; once for all choices."""
    _, whole, _ = await edge.post(CHAT, {**HI, "n": 2, "prompt_logprobs": 1})
    *chunks, _ = await edge.events(CHAT, {**HI, "n": 2, "prompt_logprobs": 1})
    _, plain, _ = await edge.post(CHAT, HI)

    assert whole["prompt_logprobs"] == SHOWN
    assert [c["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c] == [SHOWN]
    [first] = [c for c in chunks if "prompt_logprobs" in c]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "prompt_logprobs" not in plain
    asked = [submit.sampling.prompt_logprobs for submit in edge.mesh.submitted]
    assert asked == [1, None, 1, None, None]


async def test_each_choice_of_a_completion_shows_its_own(edge: Front) -> None:
    """In the choice, whole or in its first chunk, with no need of `logprobs`."""
    body = {"prompt": ["Hi", "H"], "n": 2, "prompt_logprobs": 1}
    _, whole, _ = await edge.post(COMPLETIONS, body)
    *chunks, _ = await edge.events(COMPLETIONS, body)

    assert [c["prompt_logprobs"] for c in whole["choices"]] == [SHOWN, SHOWN, [None], [None]]
    assert all(choice["logprobs"] is None for choice in whole["choices"])
    for index, expected in enumerate([SHOWN, SHOWN, [None], [None]]):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["prompt_logprobs"] == expected
        assert not any("prompt_logprobs" in choice for choice in own[1:])


@pytest.mark.parametrize("prompt", ["Hi", [72, 105]])
@pytest.mark.parametrize("max_tokens", [0, 2])
async def test_the_lists_of_an_echo_begin_with_the_prompt(
    client: openai.AsyncOpenAI, prompt: str | list[int], max_tokens: int
) -> None:
    """Tokens, logprobs and offsets of the whole text, whole and streamed; the first has none."""
    options: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "echo": True,
        "logprobs": 1,
    }
    whole = await client.completions.create(**options)
    stream = await client.completions.create(**options, stream=True)
    chunks = [chunk async for chunk in stream]

    (choice,) = whole.choices
    lists = choice.logprobs
    assert lists is not None
    assert choice.text == ("Hi" if max_tokens == 0 else "HiHello")
    assert choice.finish_reason == "length"
    assert lists.tokens == ["H", "i", "Hel", "lo"][: 2 + max_tokens]
    assert lists.token_logprobs == [None, -0.5, -0.5, -0.5][: 2 + max_tokens]
    assert lists.top_logprobs is not None
    assert lists.top_logprobs[:2] == [None, {"j": -2.0, "i": -0.5}]
    assert lists.text_offset == [0, 1, 2, 5][: 2 + max_tokens]
    assert "prompt_logprobs" not in choice.model_dump()
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        parts = [getattr(c.choices[0].logprobs, name) for c in chunks if c.choices[0].logprobs]
        assert [entry for part in parts for entry in part] == getattr(lists, name)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text


def test_an_echo_alone_ends_by_length_whatever_the_token_was_that_it_dropped() -> None:
    """An end id that was run for the sake of the echo is no `stop`, and nobody asked for it."""
    caller = Caller(request_id=R, tenant="t", timeout_s=1, model="m", secret=b"s", choices_max=1)
    body = b'{"prompt": "Hi", "echo": true, "max_tokens": 0, "logprobs": 0}'
    writer = answer(check_completion(body, caller), 0, ["Hi"])
    end_id = TokenText(-1.0, "<end>", b"<end>")
    writer.add(Delta(0, 0, [2], "", "stop", 2, [end_id], [PromptToken(1, "Hi", b"Hi")]))
    (choice,) = json.loads(writer.body(SessionEnd(None, 1, 1, 0)))["choices"]

    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (
        "Hi",
        "length",
        None,
    )
    assert choice["logprobs"]["tokens"] == ["Hi"]


async def test_an_echo_shows_no_more_alternatives_than_its_field_asked_for(edge: Front) -> None:
    """`logprobs` and `prompt_logprobs` are asked for together and shown apart."""
    body = {"prompt": "Hi", "echo": True, "max_tokens": 0, "logprobs": 0, "prompt_logprobs": 1}
    _, whole, _ = await edge.post(COMPLETIONS, body)

    assert whole["choices"][0]["prompt_logprobs"] == SHOWN
    assert whole["choices"][0]["logprobs"]["top_logprobs"] == [None, {"i": -0.5}]


async def test_too_many_are_refused_by_the_name_of_the_field(edge: Front) -> None:
    """What could not travel is a 400 before any worker is asked."""
    prompt = "x" * 4000
    for fields, param in (
        ({"prompt_logprobs": 20}, "prompt_logprobs"),
        ({"echo": True, "logprobs": 20}, "logprobs"),
    ):
        status, body, _ = await edge.post(COMPLETIONS, {"prompt": prompt, **fields})
        assert (status, body["error"]["param"]) == (400, param)
    assert edge.mesh.submitted == []


async def test_what_open_requests_hold_is_bounded() -> None:
    """Over the bound of all requests together it is a 429; the room is given back at the end."""
    async with front(prompt_logprobs_max=20) as edge:
        edge.mesh.script.stuck_after = 1
        asked = {"prompt": "Hi", "prompt_logprobs": 1}
        async with edge.client() as client:
            stream = await client.completions.create(
                model="tiny", prompt="Hi", stream=True, extra_body={"prompt_logprobs": 1}
            )
            await eventually(lambda: 1 in edge.mesh.sent.values())
            status, _, headers = await edge.post(COMPLETIONS, asked)
            plain, _, _ = await edge.post(COMPLETIONS, {"prompt": "Hi", "max_tokens": 1})
            await stream.close()
        await edge.quiet()
        edge.mesh.script.stuck_after = None
        again, _, _ = await edge.post(COMPLETIONS, asked)

    assert (status, headers["Retry-After"]) == (429, "1")
    assert (plain, again) == (200, 200)


# --- offsets ---


def tokens(*pieces: bytes) -> list[PromptToken]:
    return [PromptToken(n, p.decode(errors="replace"), p) for n, p in enumerate(pieces)]


@pytest.mark.parametrize(
    ("text", "pieces", "offsets"),
    [
        ("Hi you", [b"Hi", b" you"], [0, 2]),
        ("Hi you", [b"<s>", b"Hi", b" you"], [0, 0, 2]),
        ("Hi Hi", [b"<s>", b" Hi", b" Hi"], [0, 0, 2]),
        ("Hi", [b" ", b"Hi"], [0, 0]),
        (" Hi", [b" ", b"Hi"], [0, 1]),
        ("a€b", [b"a", b"\xe2", b"\x82\xac", b"b"], [0, 1, 1, 2]),
        ("e\u0301t", ["\u00e9".encode(), b"t"], [0, 2]),
        ("<s>Hi", [b"<s>", b"Hi"], [0, 3]),
        ("a\ufffdb", [b"a", b"\xff", b"b"], [0, 1, 2]),
        ("ab", [b"a", b"", b"b"], [0, 1, 1]),
    ],
)
def test_a_prompts_tokens_are_found_in_its_text(
    text: str, pieces: list[bytes], offsets: list[int]
) -> None:
    """Also where a vocabulary adds a begin token or a space, cuts characters, or normalizes."""
    assert prompt_offsets(tokens(*pieces), text) == offsets


@settings(max_examples=200, deadline=None)
@given(st.text("ab \u00e9\u20ac\U0001f600", max_size=20), st.data())
def test_however_a_text_is_cut_its_tokens_are_found(text: str, data: st.DataObject) -> None:
    """Tokens are bytes: each begins after the characters that are whole before it."""
    raw = text.encode()
    cuts = data.draw(st.lists(st.integers(0, len(raw)), max_size=8).map(sorted))
    edges = [0, *cuts, len(raw)]
    pieces = [raw[start:end] for start, end in pairwise(edges)]
    expected = [len(raw[:start].decode(errors="ignore")) for start in edges[:-1]]
    assert prompt_offsets(tokens(*pieces), text) == expected
    assert prompt_offsets(tokens(b"<s>", *pieces), text) == [0, *expected]


def test_offsets_of_an_answer_count_characters_not_tokens() -> None:
    """A character of two tokens is one character of the text, also over two chunks."""
    lists = CompletionLists("ab", 0)
    parts = [TokenText(-1.0, "\ufffd", raw) for raw in (b"\xe2", b"\x82\xac")]
    assert lists.take([], parts[:1])["text_offset"] == [2]
    rest = lists.take([], [*parts[1:], TokenText(-1.0, "c", b"c")])
    assert rest["text_offset"] == [2, 3]


def test_minus_infinity_has_a_number_in_json() -> None:
    """Of an alternative as of the token itself."""
    infinite = PromptToken(1, "a", b"a", float("-inf"), 9, [(2, "b", b"b", float("-inf"))])
    [shown] = prompt_logprobs([infinite], 1)
    assert shown is not None
    assert [entry["logprob"] for entry in shown.values()] == [-9999.0, -9999.0]
