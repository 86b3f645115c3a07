"""Model files: what the default model says, Hugging Face directories, and broken files by name."""

import contextlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.gguf_file import TensorInfo, read_gguf
from shared.model_files import (
    ModelFileError,
    ModelFiles,
    Vocabulary,
    default_model,
    read_model,
)
from shared.sampling import SamplingDefaults

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9


def text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(content: Any) -> bytes:
    """A metadata value with its type."""
    match content:
        case str():
            return struct.pack("<I", STRING) + text(content)
        case bool():
            return struct.pack("<I?", BOOL, content)
        case int():
            return struct.pack("<II", UINT32, content)
        case [str(), *_]:
            items = b"".join(map(text, content))
            return struct.pack("<IIQ", ARRAY, STRING, len(content)) + items
        case [float(), *_]:
            items = struct.pack(f"<{len(content)}f", *content)
            return struct.pack("<IIQ", ARRAY, FLOAT32, len(content)) + items
        case [*_]:
            items = struct.pack(f"<{len(content)}i", *content)
            return struct.pack("<IIQ", ARRAY, INT32, len(content)) + items
    raise AssertionError(content)


METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["<|end|>", "a", "Ġb", "<tool>", "Ġ"],
    "tokenizer.ggml.token_type": [3, 1, 1, 4, 1],
    "tokenizer.ggml.merges": ["Ġ b"],
    "tokenizer.ggml.eos_token_id": 0,
}


def gguf(changes: dict[str, Any] | None = None, version: int = 3) -> bytes:
    """A small model file: `METADATA` with `changes` (None = key left out) and one tensor."""
    metadata = {k: v for k, v in (METADATA | (changes or {})).items() if v is not None}
    head = b"GGUF" + struct.pack("<IQQ", version, 1, len(metadata))
    head += b"".join(text(key) + value(content) for key, content in metadata.items())
    head += text("w") + struct.pack("<IQQIQ", 2, 3, 2, 0, 0)
    return head + bytes(-len(head) % 32) + bytes(24)


def written(folder: Path, content: bytes) -> Path:
    file = folder / "tiny.gguf"
    file.write_bytes(content)
    return file


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return read_model(default_model())


def test_default_model(files: ModelFiles) -> None:
    """Limits, special ids and template of SmolLM2 from the file alone."""
    assert files.name.startswith("SmolLM2-135M-Instruct")
    assert (files.architecture, files.max_model_len) == ("llama", 8192)
    assert files.vocabulary.size == 49152
    assert files.end_ids == {0, 2}
    assert (files.bos_id, files.add_bos) == (1, False)
    assert files.special_texts["eos_token"] == "<|im_end|>"
    assert files.vocabulary.special == set(range(17))
    assert "add_generation_prompt" in files.chat_template


def test_raw_bytes_of_ids(files: ModelFiles) -> None:
    """The byte alphabet is undone: spaces are spaces, and every byte has a token of its own."""
    vocabulary = files.vocabulary
    assert vocabulary.text([19556, 905], skip_special_tokens=True) == "Hello world"
    single = {vocabulary.raw(i) for i in range(vocabulary.size)} - {b""}
    assert not {bytes([b]) for b in range(0x20, 0x7F)} - single
    assert vocabulary.raw(2) == b"<|im_end|>"
    assert vocabulary.raw(-1) == vocabulary.raw(10**9) == b""


def test_tensor_table(files: ModelFiles) -> None:
    """Shapes are row-major; the last tensor ends where the file ends."""
    head = read_gguf(files.path)
    embedding = head.tensors["token_embd.weight"]
    assert embedding.shape == (49152, 576)
    assert max(t.offset + t.num_bytes for t in head.tensors.values()) == files.path.stat().st_size


def test_small_file(tmp_path: Path) -> None:
    """Control tokens are special, user-defined ones are not; both are their own text."""
    model = read_model(written(tmp_path, gguf()))
    assert model.vocabulary.tokens == (b"<|end|>", b"a", b" b", b"<tool>", b" ")
    assert model.vocabulary.special == {0}
    assert model.end_ids == {0}
    assert model.bpe is not None
    assert model.bpe.user == {3}
    [(name, tensor)] = read_gguf(model.path).tensors.items()
    assert (name, tensor.shape, tensor.num_bytes) == ("w", (2, 3), 24)
    assert tensor.offset == len(gguf()) - 24


def test_rows_that_fill_up_a_matrix_are_no_text(tmp_path: Path) -> None:
    """Converters name them [PAD712] and call them unused. If one is drawn, nobody reads that."""
    tokens = ["<s>", "a", "\u2581b", "[PAD3]"]
    types = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 1, 1, 5]}
    spm = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.scores": [0.0, -1.0, -2.0, -9.0]}
    for changes in (types | spm, types | {"tokenizer.ggml.tokens": ["<s>", "a", "Ġb", "[PAD3]"]}):
        vocabulary = read_model(written(tmp_path, gguf(changes))).vocabulary
        assert vocabulary.tokens == (b"<s>", b"a", b" b", b"")


def test_unknown_tensor_type_has_no_known_size() -> None:
    assert TensorInfo((4,), 99, 0).num_bytes == 0


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": [1, 2, 3, 4, 5]}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1]}, "tokenizer.ggml.token_type"),
        ({"tokenizer.ggml.eos_token_id": "a"}, "tokenizer.ggml.eos_token_id"),
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template"),
        ({"tokenizer.ggml.eos_token_id": 5}, "tokenizer.ggml.eos_token_id"),
        ({"llama.context_length": None}, "llama.context_length"),
        ({"general.architecture": None}, "general.architecture"),
        ({"general.alignment": 0}, "general.alignment"),
    ],
)
def test_bad_key_is_named(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_model(written(tmp_path, gguf(changes)))
    assert caught.value.what == key
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"PK\x03\x04zip", gguf(version=99)])
def test_foreign_file_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(ModelFileError):
        read_model(written(tmp_path, content))


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"none\.gguf"):
        read_model(tmp_path / "none.gguf")


def test_truncated_anywhere_is_refused(tmp_path: Path) -> None:
    """Wherever a file is cut, it is refused, and the cut weights are named."""
    whole = gguf()
    for cut in range(1, len(whole)):
        with pytest.raises(ModelFileError) as caught:
            read_model(written(tmp_path, whole[:-cut]))
        if cut <= 24:
            assert caught.value.what == "w"
            assert "truncated" in caught.value.reason


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_flipped_bytes_never_do_worse_than_refuse(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever stands in the head, the reader returns or refuses; nothing else is raised."""
    content = bytearray(gguf())
    for place in data.draw(st.lists(st.integers(4, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))
    file = written(tmp_path_factory.mktemp("flip"), bytes(content))
    with contextlib.suppress(ModelFileError):
        read_model(file)


# --- Hugging Face directories ------------------------------------------------------------------

TOKENIZER: dict[str, Any] = {
    "model": {"type": "BPE", "vocab": {"a": 0, "Ġb": 1, "é": 2}, "merges": []},
    "added_tokens": [
        {"id": 4, "content": "<|im_end|>", "special": True},
        {"id": 5, "content": "<tool>", "special": False},
    ],
}
CONFIG: dict[str, Any] = {
    "max_position_embeddings": 128,
    "model_type": "llama",
    "eos_token_id": 9,
}


def directory(folder: Path, **files: Any) -> Path:
    """A model directory; names lack their `.json`."""
    contents = {"config": CONFIG, "tokenizer": TOKENIZER} | files
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_directory(tmp_path: Path) -> None:
    """generation_config wins over config for end ids; holes in the vocabulary are empty."""
    model = read_model(
        directory(
            tmp_path,
            generation_config={"eos_token_id": [3, 4]},
            tokenizer_config={"chat_template": "{{ 1 }}", "eos_token": {"content": "<|im_end|>"}},
        )
    )
    assert model.vocabulary.tokens == (b"a", b" b", b"\xe9", b"", b"<|im_end|>", b"<tool>")
    assert model.end_ids == {3, 4}
    assert model.vocabulary.special == {4}
    assert (model.max_model_len, model.chat_template) == (128, "{{ 1 }}")
    assert model.special_texts == {"eos_token": "<|im_end|>"}


def test_sampling_defaults_are_what_the_generation_config_names(tmp_path: Path) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "do_sample": True, "pad_token_id": 0}
    (tmp_path / "named").mkdir()
    (tmp_path / "silent").mkdir()
    named = read_model(directory(tmp_path / "named", generation_config=generation))
    assert named.sampling_defaults == SamplingDefaults(temperature=0.6, top_k=20)
    assert read_model(directory(tmp_path / "silent")).sampling_defaults == SamplingDefaults()


def test_template_file_wins(tmp_path: Path) -> None:
    folder = directory(tmp_path, tokenizer_config={"chat_template": "old"})
    assert read_model(folder).chat_template == "old"
    (folder / "chat_template.jinja").write_text("new")
    assert read_model(folder).chat_template == "new"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "x"}, {"name": "default", "template": "y"}]
    folder = directory(tmp_path, tokenizer_config={"chat_template": named})
    assert read_model(folder).chat_template == "y"


def test_byte_fallback_vocabulary(tmp_path: Path) -> None:
    """SentencePiece tokens: U+2581 is a space, <0xNN> is that byte."""
    model = {"type": "BPE", "vocab": {"▁a": 0, "<0xE2>": 1}, "byte_fallback": True}
    folder = directory(tmp_path, tokenizer={"model": model})
    assert read_model(folder).vocabulary.tokens == (b" a", b"\xe2")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config", {"model_type": "llama"}),
        ("config", []),
        ("tokenizer", {"model": {"type": "Unigram", "vocab": {}}}),
        ("tokenizer", {"model": {"type": "BPE", "vocab": {}}}),
        ("tokenizer", {"model": {"type": "BPE", "vocab": {"a": 10**9}}}),
        ("tokenizer_config", {"chat_template": 3}),
        ("generation_config", {"temperature": -1}),
        ("generation_config", {"top_p": 0}),
    ],
)
def test_bad_directory_names_the_file(tmp_path: Path, name: str, content: Any) -> None:
    with pytest.raises(ModelFileError) as caught:
        read_model(directory(tmp_path, **{name: content}))
    assert caught.value.file.endswith(f"{name}.json")


def test_directory_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"config\.json"):
        read_model(tmp_path)


def test_vocabulary_by_hand() -> None:
    vocabulary = Vocabulary([b"\xe2\x82", b"\xac", b"<x>"], special={2}, end_ids={2})
    assert vocabulary.text([0, 2, 1], skip_special_tokens=True) == "€"
    assert vocabulary.text([0, 2, 1], skip_special_tokens=False) == "\ufffd<x>\ufffd"
    assert (vocabulary.size, vocabulary.token_bytes_max) == (3, 3)


# --- SentencePiece -----------------------------------------------------------------------------

SPM_METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.tokens": ["<unk>", "</s>", "▁a", "<|end|>", "▁▁"],
    "tokenizer.ggml.token_type": [2, 3, 1, 4, 4],
    "tokenizer.ggml.scores": [0.0, 0.0, -1.0, 0.0, 0.0],
    "tokenizer.ggml.eos_token_id": 1,
    "tokenizer.ggml.unknown_token_id": 0,
}


def test_spm_file(tmp_path: Path) -> None:
    """What old converters call user-defined and only a template may write is a control token."""
    model = read_model(written(tmp_path, gguf(SPM_METADATA)))
    assert model.vocabulary.tokens == (b"<unk>", b"</s>", b" a", b"<|end|>", b"  ")
    assert model.vocabulary.special == {0, 1, 3}
    assert model.end_ids == {1, 3}
    assert model.vocabulary.text([2, 2], skip_special_tokens=True) == "a a"
    assert (model.add_bos, model.special_texts["unk_token"]) == (True, "<unk>")
    assert model.spm is not None
    assert (model.spm.space_prefix, model.spm.single_spaces) == (True, False)
    changes = SPM_METADATA | {"tokenizer.ggml.add_space_prefix": False}
    without = read_model(written(tmp_path, gguf(changes)))
    assert without.vocabulary.text([2, 2], skip_special_tokens=True) == " a a"


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("scores", None),
        ("scores", [1, 2, 3, 4, 5]),
        ("scores", [0.0]),
        ("scores", [0.0, 0.0, float("nan"), 0.0, 0.0]),
        ("tokens", ["<unk>", "</s>", "a", "a", "b"]),
        ("tokens", ["<unk>", "</s>", "a", "b", "c" * 257]),
        ("token_type", [2, 3, 6, 1, 1]),
        ("add_space_prefix", 1),
    ],
)
def test_bad_spm_key_is_named(tmp_path: Path, key: str, content: Any) -> None:
    """Also a byte token that names no byte: 6 is the type of `<0x41>`."""
    key = f"tokenizer.ggml.{key}"
    with pytest.raises(ModelFileError) as caught:
        read_model(written(tmp_path, gguf(SPM_METADATA | {key: content})))
    assert caught.value.what == key


def test_one_byte_token_is_not_enough(tmp_path: Path) -> None:
    changes = {
        "tokenizer.ggml.tokens": ["<unk>", "</s>", "<0x41>", "b", "c"],
        "tokenizer.ggml.token_type": [2, 3, 6, 1, 1],
    }
    with pytest.raises(ModelFileError, match="1 byte tokens, not 256"):
        read_model(written(tmp_path, gguf(SPM_METADATA | changes)))
