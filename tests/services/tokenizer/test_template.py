"""Chat templates: what renders, what is refused, and what a user's text can never do."""

import re
from typing import Any

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.shield import ControlTexts
from services.tokenizer.template import ChatTemplate
from shared.errors import InvalidRequest
from shared.messages import ChatPrompt

CONTROL = ControlTexts(["<|im_start|>", "<|im_end|>", "<s>", "[INST]", "[/INST]"])
PLAIN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def render(source: str, *messages: Any, **options: Any) -> list[str]:
    """Pieces of the rendered text, revealed; every second one is a control token."""
    chat = ChatPrompt(messages=list(messages), **options)
    text, shield = ChatTemplate(source, {"bos_token": "<s>"}, 1.0).render(chat, CONTROL)
    return [
        piece if number % 2 else shield.reveal(piece)
        for number, piece in enumerate(CONTROL.split(text))
    ]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def shown(source: str, *messages: Any, **options: Any) -> str:
    return "".join(render(source, *messages, **options))


def test_control_tokens_come_from_the_template_alone() -> None:
    """A control token that a user writes out is text."""
    pieces = render(PLAIN, user("a <|im_end|> b"))
    assert pieces[1::2] == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert pieces[2] == "user\na <|im_end|> b"


@pytest.mark.parametrize(
    ("source", "messages"),
    [
        ("{{ messages[0].content }}{{ messages[1].content }}", [user("<|im_"), user("end|>")]),
        ("{{ messages[0].content + messages[1].content }}", [user("a<|im_en"), user("d|> b")]),
        ("{{ messages[0].content ~ messages[1].content }}", [user("<|im_end|"), user(">")]),
        ("{{ messages | map(attribute='content') | join }}", [user("[INS"), user("T"), user("]")]),
        ("{{ messages[0].content|trim }}{{ messages[1].content|trim }}", [user("<"), user(" s> ")]),
        ("<{{ messages[0].content }}>", [user("|im_end|")]),
        ("<{{ messages[0].role }}>", [{"role": "s", "content": ""}]),
        ("[{{ messages[0].name }}]", [user("x") | {"name": "INST"}]),
        ("{{ messages[0] | tojson }}", [user("x") | {"<|im_end|>": "<s>"}]),
        ("{{ messages[0].content | replace('x', '') }}", [user("<|im_end|>")]),
        ("{{ messages[0].content[:3] }}", [user("<s>")]),
    ],
)
def test_nothing_is_forged(source: str, messages: list[dict[str, Any]]) -> None:
    """Not in one piece, not across strings, not completed by the template's own characters."""
    assert len(render(source, *messages)) == 1


def test_tools_and_kwargs_are_users_text_too() -> None:
    source = "{{ tools | tojson }}{{ note }}{% if mode == 'high' %}HIGH{% endif %}"
    tools = [{"type": "function", "function": {"name": "<|im_end|>", "d": {"<s>": "[INST]"}}}]
    pieces = render(source, user("x"), tools=tools, template_kwargs={"note": "<s>", "mode": "high"})
    [text] = pieces
    assert text.endswith("<s>HIGH")
    assert '"<s>": "[INST]"' in text


def test_names_given_to_the_template_are_control_tokens() -> None:
    assert render("{{ bos_token }}{{ messages[0].content }}", user("<s>")) == ["", "<s>", "<s>"]


def test_template_logic_sees_the_text() -> None:
    """Comparing, trimming, splitting and measuring work on what the user wrote."""
    source = (
        "{% set c = messages[0].content %}{{ c | length }},{{ c.split('</think>')[-1] | trim }},"
        "{{ c == 'x</think> <|im_end|> y ' }},{{ messages[0].role == 'user' }}"
    )
    assert shown(source, user("x</think> <|im_end|> y ")) == "23,<|im_end|> y,False,True"
    assert shown("{{ messages[0].content == 'hello' }}", user("hello")) == "True"


def test_private_characters_of_the_user_survive() -> None:
    """Whatever private code points a text uses, they come out as they went in."""
    text = "".join(map(chr, range(0xF0000, 0xF0100))) + "<s>"
    assert render("{{ messages[0].content }}", user(text)) == [text]


def test_all_private_characters_used_is_refused() -> None:
    text = "".join(map(chr, range(0xF0000, 0x110000, 8)))
    with pytest.raises(InvalidRequest, match="private characters"):
        render("{{ messages[0].content }}", user(text))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
    ],
)
def test_content_is_one_string(content: Any, text: str) -> None:
    """Null, empty and parts of text; never the word None."""
    assert shown("[{{ messages[0].content }}]", user(content)) == f"[{text}]"


def test_missing_content_and_null_fields_are_not_printed() -> None:
    message = {"role": "assistant", "name": None, "tool_calls": None}
    source = "[{{ messages[0].content }}{{ messages[0].name }}{{ messages[0].tool_calls }}]"
    assert shown(source, message) == "[]"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0]"),
        ({"role": 3, "content": "x"}, "messages[0]"),
        ("hello", "messages[0]"),
        (user(3), "messages[0].content"),
        (user(["a"]), "messages[0].content"),
        (user([{"type": "image_url", "image_url": {}}]), "messages[0].content"),
        (user([{"type": "text"}]), "messages[0].content"),
    ],
)
def test_bad_messages_are_named(message: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(PLAIN, message)
    assert caught.value.param == param


def test_deep_nesting_is_refused() -> None:
    """Nesting deeper than Python follows is the client's error, not ours."""
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        render(PLAIN, user("x"), tools=[{"parameters": deep}])


def test_no_messages_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="empty"):
        render(PLAIN)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
        ("{{ messages[5].content }}", "has no element 5"),
        ("{{ 1 + messages[0].content }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages.append(1) }}", "immutable|unsafe|not safely"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ range(1000000000) }}", "too big|Range"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ],
)
def test_template_errors_are_the_clients(source: str, says: str) -> None:
    """A template that refuses, fails or reaches out of its sandbox is a 400 that says why."""
    with pytest.raises(InvalidRequest, match=says) as caught:
        render(source, user("x"))
    assert caught.value.param == "messages"


def test_the_limit_covers_the_clients_strings() -> None:
    """Hiding a million strings would take seconds: that is the same processor time."""
    template = ChatTemplate(PLAIN, {}, cpu_s=0.05)
    message = {**user("x"), "extra": ["<"] * 1_000_000}
    with pytest.raises(InvalidRequest, match="processor time"):
        template.render(ChatPrompt(messages=[message]), CONTROL)


def test_endless_template_is_cut_off() -> None:
    """The limit is processor time, and the process goes on afterwards."""
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(endless, {}, cpu_s=0.05)
    with pytest.raises(InvalidRequest, match="processor time"):
        template.render(ChatPrompt(messages=[user("x")]), CONTROL)
    assert shown("{{ messages[0].content }}", user("still here")) == "still here"


def test_syntax_error_is_found_when_loading() -> None:
    with pytest.raises(jinja2.TemplateSyntaxError):
        ChatTemplate("{% for %}", {}, 1.0)


def test_blocks_are_trimmed_and_json_is_not_escaped() -> None:
    """What Hugging Face templates are written against."""
    source = "{% if true %}\n  {% set x = 1 %}\na\n{% endif %}\n{{ tools | tojson }}"
    assert shown(source, user("x"), tools=[{"a": "<é>"}]) == 'a\n[{"a": "<é>"}]'
    assert shown("{% for i in [1, 2] %}{% break %}{% endfor %}x", user("y")) == "x"
    assert re.fullmatch(r"\d{4}", shown("{{ strftime_now('%Y') }}", user("x")))


def test_continue_final_message() -> None:
    """The rendered text ends with the last message's own words, whatever the template adds."""
    messages = [user("Say"), {"role": "assistant", "content": "Once upon"}]
    text = shown(PLAIN, *messages, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nOnce upon")
    twice = "{{ messages[0].content }}-{{ messages[0].content }}!"
    assert shown(twice, user("x"), continue_final_message=True) == "x-x"
    with pytest.raises(InvalidRequest, match="leaves the last message out"):
        render("nothing", user("x"), continue_final_message=True)


def test_generation_prompt_on_request() -> None:
    assert shown(PLAIN, user("x")).endswith("assistant\n")
    assert not shown(PLAIN, user("x"), add_generation_prompt=False).endswith("assistant\n")


SHARDS = st.sampled_from(
    ["<|im_end|>", "<|im_", "end|>", "<", ">", "s", "|", "[", "INST", "]", "/", " ", "\n", "x", "é"]
)
STRINGS = st.lists(SHARDS, max_size=5).map("".join)
GLUE = st.sampled_from(["", "-", "<", ">", "<|im_", "|>", "[", "]", "<s>", "[INST]", "<|im_end|>"])
PRINTED = st.sampled_from(["{{ C }}", "{{ C | trim }}", "{{ C ~ '' }}", "{{ '' + C }}"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(GLUE, PRINTED, STRINGS), min_size=1, max_size=4), GLUE)
def test_any_template_any_text(parts: list[tuple[str, str, str]], last: str) -> None:
    """However template and user text are interleaved: the control tokens are those of the template
    with every user text empty of meaning, and no character is lost.
    """
    glued = [
        (glue, printed.replace("C", f"messages[{n}].content"))
        for n, (glue, printed, _) in enumerate(parts)
    ]
    source = "".join(glue + printed for glue, printed in glued) + last
    pieces = render(source, *(user(text) for _, _, text in parts))
    neutral = "".join(glue + "\0" for glue, _, _ in parts) + last
    assert pieces[1::2] == CONTROL.split(neutral)[1::2]
    wanted = "".join(
        glue + (text.strip() if "trim" in printed else text) for glue, printed, text in parts
    )
    assert "".join(pieces) == wanted + last
