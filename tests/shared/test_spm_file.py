"""`tokenizer.model` files written by hand: what is read, and what is refused by name."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model_files import ModelFileError, read_model


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def proto(*fields: tuple[int, Any]) -> bytes:
    """A protocol buffer: ints, floats, and the bytes of strings and messages."""
    raw = b""
    for number, content in fields:
        match content:
            case int():
                raw += varint(number << 3) + varint(content % 2**64)
            case float():
                raw += varint(number << 3 | 5) + struct.pack("<f", content)
            case bytes():
                raw += varint(number << 3 | 2) + varint(len(content)) + content
    return raw


def piece(text: str, score: float = 0.0, kind: int = 1) -> tuple[int, bytes]:
    return 1, proto((1, text.encode()), (2, score), (3, kind))


SPM_PIECES = [
    piece("<unk>", kind=2),
    piece("<s>", kind=3),
    piece("</s>", kind=3),
    piece("▁a", -1.0),
]
BPE_TYPE = (3, 2)


def spm(*pieces: tuple[int, bytes], trainer: Any = (BPE_TYPE,), normalizer: Any = ()) -> bytes:
    return proto(*(pieces or SPM_PIECES), (2, proto(*trainer)), (3, proto(*normalizer)))


def spm_directory(folder: Path, model: bytes, **files: Any) -> Path:
    (folder / "tokenizer.model").write_bytes(model)
    config = {"max_position_embeddings": 128, "model_type": "llama"}
    for name, content in ({"config": config} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_directory_with_a_tokenizer_model_alone(tmp_path: Path) -> None:
    """Its ids are the model's; fields it does not write have SentencePiece's defaults."""
    model = read_model(spm_directory(tmp_path, spm()))
    assert model.vocabulary.tokens == (b"<unk>", b"<s>", b"</s>", b" a")
    assert model.special_texts == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (model.bos_id, model.add_bos, model.end_ids) == (1, True, {2})
    assert model.spm is not None
    assert (model.spm.space_prefix, model.spm.single_spaces) == (True, True)


def test_tokenizer_json_is_read_rather_than_a_model(tmp_path: Path) -> None:
    other = {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}
    folder = spm_directory(tmp_path, b"broken", tokenizer=other)
    assert read_model(folder).tokenizer_json == folder / "tokenizer.json"


def test_added_tokens(tmp_path: Path) -> None:
    """Of both files that may list them; they may change what the model has, or skip ids."""
    listed = {
        "2": {"content": "</s>", "special": True, "rstrip": True},
        "5": {"content": "<|user|>", "special": True, "lstrip": True},
        "6": {"content": "<tool>"},
    }
    config = {"added_tokens_decoder": listed, "add_bos_token": False, "eos_token": "<|user|>"}
    folder = spm_directory(
        tmp_path, spm(), tokenizer_config=config, added_tokens={"<pad>": 8, "<tool>": 6}
    )
    model = read_model(folder)
    assert model.vocabulary.tokens[4:] == (b"", b"<|user|>", b"<tool>", b"", b"<pad>")
    assert model.vocabulary.special == {0, 1, 2, 5, 8}
    assert (model.end_ids, model.add_bos) == ({5}, False)
    assert model.spm is not None
    assert (model.spm.eats_left, model.spm.eats_right) == ({5}, {2})
    assert model.spm.kinds.user == {6}


@pytest.mark.parametrize(
    ("model", "what", "reason"),
    [
        (spm(trainer=[(3, 1)]), "trainer_spec.model_type", "Unigram"),
        (spm(trainer=()), "trainer_spec.model_type", "Unigram"),
        (spm(trainer=[(3, 4)]), "trainer_spec.model_type", "Char"),
        (spm(trainer=[BPE_TYPE, (24, 1)]), "trainer_spec.treat_whitespace_as_suffix", "space"),
        (spm(trainer=[(3, b"x")]), "trainer_spec", "field 3 is not of type int"),
        (spm(trainer=[BPE_TYPE, (41, b"x")]), "trainer_spec", "field 41"),
        (spm(normalizer=[(1, b"nmt_nfkc"), (2, b"x")]), "normalizer_spec.name", "nmt_nfkc"),
        (spm(normalizer=[(5, 0)]), "normalizer_spec.escape_whitespaces", "false"),
        (spm(normalizer=[(3, b"x")]), "normalizer_spec", "field 3"),
        (spm(piece("a"), (1, b"\x0a\x09ab")), "piece 1", "truncated"),
        (spm(piece("a"), (1, proto((1, b"\xff")))), "piece 1", "utf-8"),
        (spm(piece("a"), (1, proto((1, 7)))), "piece 1", "field 1 is not of type bytes"),
        (spm(piece("a"), (1, proto((2, b"xy")))), "piece 1", "no float"),
        (spm(piece("a"), (1, 7)), "piece 1", "number"),
        (spm(piece("a"), piece("a")), "pieces: tokens", "twice"),
        (spm(piece("a", float("inf"))), "pieces: scores", "finite"),
        (spm(piece("a", kind=6)), "pieces: token_type", "no byte"),
        (proto((2, proto(BPE_TYPE))), "pieces: tokens", "0 of them"),
        (b"\x0b", "model", "unknown way 3"),
        (b"\xff" * 20, "model", "does not end"),
    ],
)
def test_bad_tokenizer_model_says_what(
    tmp_path: Path, model: bytes, what: str, reason: str
) -> None:
    with pytest.raises(ModelFileError, match=reason) as caught:
        read_model(spm_directory(tmp_path, model))
    assert caught.value.file.endswith("tokenizer.model")
    assert caught.value.what == what


@pytest.mark.parametrize("ids", [{"x": -1}, {"x": 1 << 22}, {"<s>": 3}, {"x" * 257: 9}])
def test_bad_added_tokens_are_refused(tmp_path: Path, ids: dict[str, int]) -> None:
    with pytest.raises(ModelFileError, match="added_tokens"):
        read_model(spm_directory(tmp_path, spm(), added_tokens=ids))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_tokenizer_model_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes changed, lost or doubled: nothing but `ModelFileError` is raised."""
    content = spm(normalizer=[(3, 1), (4, 0)])
    at = data.draw(st.integers(0, len(content)))
    end = data.draw(st.integers(at, min(len(content), at + 4)))
    content = content[:at] + data.draw(st.binary(max_size=4)) + content[end:]
    folder = spm_directory(tmp_path_factory.mktemp("spm"), content)
    with contextlib.suppress(ModelFileError):
        read_model(folder)
