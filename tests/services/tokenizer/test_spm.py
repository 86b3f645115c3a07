"""SentencePiece vocabularies against SentencePiece itself, whatever file they come in."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.tokenizer.tokenizer import Tokenizer
from shared.model_files import read_model
from tests.services.tokenizer import spm_kit
from tests.services.tokenizer.odd_strings import ODD_STRINGS
from tests.services.tokenizer.spm_kit import TINY, Reference

REAL = {"mistral 7b v0.3": "*240323.model.v3"}
NAMES = [*TINY, *REAL]
KEEPS_SPACES = [name for name in NAMES if "single" not in name]


class Model:
    """One SentencePiece model, read every way."""

    def __init__(self, folder: Path, name: str) -> None:
        if name in REAL:
            file = spm_kit.mistral(REAL[name])
        else:
            file = spm_kit.trained(folder / "tokenizer.model", **TINY[name])
        self.reference = Reference(file)
        keys = {
            "ggml__add_space_prefix": "no prefix" not in name and name != "gemma",
            "ggml__remove_extra_whitespaces": "single" in name,
        }
        self.files = {
            "gguf": read_model(spm_kit.gguf(folder / "model.gguf", file, **keys)),
            "directory": read_model(spm_kit.directory(folder / "directory", file)),
        }
        self.tokenizers = {kind: Tokenizer(files) for kind, files in self.files.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {name: Model(tmp_path_factory.mktemp("spm"), name) for name in NAMES}


@pytest.mark.parametrize("kind", ["gguf", "directory"])
@pytest.mark.parametrize("name", NAMES)
def test_odd_strings_have_the_ids_of_sentencepiece(
    models: dict[str, Model], name: str, kind: str
) -> None:
    model = models[name]
    encoded = {text: model.tokenizers[kind].encode(text, False) for text in ODD_STRINGS}
    assert encoded == {text: model.reference.encode(text) for text in ODD_STRINGS}


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(NAMES),
    st.one_of(
        st.text(max_size=30),
        st.lists(
            st.sampled_from(["  ", " ", "a", "the", "==", "\n", "é", "<table>", "\u2581"])
        ).map("".join),
    ),
)
def test_any_text_has_the_ids_of_sentencepiece(
    models: dict[str, Model], name: str, text: str
) -> None:
    model = models[name]
    assert model.tokenizers["gguf"].encode(text, False) == model.reference.encode(text)


@pytest.mark.parametrize("name", NAMES)
def test_beginning_of_text_comes_once(models: dict[str, Model], name: str) -> None:
    """Both kinds of file want it where they say nothing; a text that has it gets no more."""
    for kind, tokenizer in models[name].tokenizers.items():
        bos = models[name].reference.model.bos_id()
        text = models[name].files[kind].special_texts["bos_token"] + "hi"
        assert tokenizer.encode("hi") == [bos, *tokenizer.encode("hi", False)]
        assert tokenizer.encode(text) == tokenizer.encode(text, False)
        assert tokenizer.encode(text).count(bos) == 1


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(KEEPS_SPACES), st.lists(st.integers(0, 5000), max_size=12))
def test_text_of_ids_is_that_of_sentencepiece(
    models: dict[str, Model], name: str, ids: list[int]
) -> None:
    """The first space goes if the encoder put it there; bytes join to characters; bytes that are
    none are U+FFFD each. Control tokens, the unknown one too, leave no trace. (A space as a byte,
    which nothing encodes to, is a first space for us, as for `transformers`.)
    """
    model = models[name]
    processor = model.reference.model
    ids = [i for i in ids if i < len(processor) and processor.id_to_piece(i) != "<0x20>"]
    vocabulary = model.files["gguf"].vocabulary
    texts = [i for i in ids if i not in vocabulary.special]
    assert vocabulary.text(ids, skip_special_tokens=True) == processor.decode(texts)


@pytest.mark.parametrize("name", NAMES)
def test_only_control_tokens_are_special(models: dict[str, Model], name: str) -> None:
    """And Gemma's marks of a turn, which SentencePiece calls user-defined."""
    processor = models[name].reference.model
    for files in models[name].files.values():
        special = {processor.id_to_piece(i) for i in files.vocabulary.special}
        control = (i for i in range(len(processor)) if processor.is_control(i))
        assert special - {"<start_of_turn>", "<end_of_turn>"} == {
            processor.id_to_piece(processor.unk_id()),
            *map(processor.id_to_piece, control),
        }
        assert ("<start_of_turn>" in special) == (name == "gemma")
        ends = {processor.id_to_piece(i) for i in files.end_ids}
        assert ends == ({"<eos>", "<end_of_turn>"} if name == "gemma" else {"</s>"})
