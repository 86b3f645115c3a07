"""Directories of every family against `transformers`: ids of texts and chats, and texts of ids."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.tokenizer import Tokenizer
from shared.messages import ChatPrompt
from shared.model_files import read_model
from tests.services.tokenizer import families
from tests.services.tokenizer.families import FAMILIES
from tests.services.tokenizer.odd_strings import ODD_STRINGS


class Family:
    def __init__(self, name: str, folder: Path) -> None:
        self.reference = families.directory_of(name, folder)
        self.files = read_model(folder / "saved")
        self.tokenizer = Tokenizer(self.files)
        special = sorted(self.reference.all_special_tokens, key=len, reverse=True)
        self.control = re.compile("|".join(map(re.escape, special)))

    def chat(self, messages: list[dict[str, Any]]) -> list[int]:
        ids: list[int] = self.reference.apply_chat_template(
            messages, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return ids


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    return {name: Family(name, tmp_path_factory.mktemp("family")) for name in FAMILIES}


@pytest.mark.parametrize("name", FAMILIES)
def test_odd_strings_have_the_ids_of_transformers(made: dict[str, Family], name: str) -> None:
    family = made[name]
    for text in ODD_STRINGS:
        wanted = family.reference.encode(text, add_special_tokens=False)
        assert family.tokenizer.encode(text, add_special_tokens=False) == wanted, text
        wanted = family.reference.encode(text)
        if wanted[:2] != [family.reference.bos_token_id] * 2:  # which is no token of a text
            assert family.tokenizer.encode(text) == wanted, text


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FAMILIES), st.text(max_size=30))
def test_any_text_has_the_ids_of_transformers(
    made: dict[str, Family], name: str, text: str
) -> None:
    family = made[name]
    wanted = family.reference.encode(text, add_special_tokens=False)
    assert family.tokenizer.encode(text, add_special_tokens=False) == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_chats_have_the_ids_of_transformers(made: dict[str, Family], name: str) -> None:
    """One beginning-of-text, spaces before and after marks as the files say; and what would be a
    control token for `transformers`, because a user wrote it, is text.
    """
    family = made[name]
    for text in ODD_STRINGS:
        messages = [
            {"role": "user", "content": text},
            {"role": "assistant", "content": f"{text} indeed"},
            {"role": "user", "content": f" {text}\n"},
        ]
        ids = family.tokenizer.encode_chat(ChatPrompt(messages=messages))
        if family.control.search(text):
            plain = [message | {"content": "x"} for message in messages]
            marks = [i for i in ids if i in family.files.vocabulary.special]
            wanted = family.chat(plain)
            assert marks == [i for i in wanted if i in family.files.vocabulary.special]
        else:
            assert ids == family.chat(messages), text


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(FAMILIES),
    st.lists(st.integers(0, 50_000), max_size=12),
    st.booleans(),
    st.data(),
)
def test_text_of_ids_is_that_of_transformers(
    made: dict[str, Family], name: str, ids: list[int], skip: bool, data: st.DataObject
) -> None:
    """Of whole texts, with and without their control tokens. (Bytes that are no character are left
    out: `transformers` takes back what they stand beside.)
    """
    family = made[name]
    ids = [i % len(family.reference) for i in ids]
    ids += family.reference.encode(
        data.draw(st.text("aé日😀 ", max_size=4)), add_special_tokens=False
    )
    text = family.files.vocabulary.text(ids, skip)
    if "\ufffd" not in text:
        assert text == family.reference.decode(ids, skip_special_tokens=skip)
