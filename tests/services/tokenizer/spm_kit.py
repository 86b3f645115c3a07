"""SentencePiece models for tests, real and tiny, as directories and as GGUF files."""

import importlib.util
import io
import json
import re
import shutil
from pathlib import Path

import sentencepiece
from gguf import GGUFWriter, TokenType

from tests.services.tokenizer.odd_strings import ODD_STRINGS

CONFIG = {"max_position_embeddings": 4096, "model_type": "llama"}
# Ordinary words, so that there is something to merge.
LINES = [
    *filter(None, (line for text in ODD_STRINGS for line in text.split("\0"))),
    "The quick brown fox jumps over the lazy dog, and the dog does not mind it at all.",
    "Why not? The answer is always the same: it depends on what the question was.",
    "Der schnelle braune Fuchs; le renard brun rapide; el zorro marrón; быстрая лиса.",
    "for i in range(10):\n    print(i, end=' ')  # ten numbers",
]
GEMMA = {
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "pad_id": 0,
    "eos_id": 1,
    "bos_id": 2,
    "unk_id": 3,
    "pad_piece": "<pad>",
    "eos_piece": "<eos>",
    "bos_piece": "<bos>",
    "user_defined_symbols": [
        "<start_of_turn>",
        "<end_of_turn>",
        *("\n" * n for n in range(1, 5)),
        *("\u2581" * n for n in range(2, 32)),
        "<table>",
    ],
}
LLAMA = {"remove_extra_whitespaces": False}
TINY = {
    "gemma": GEMMA,
    "llama": LLAMA,
    "without bytes": LLAMA | {"byte_fallback": False},
    "single spaces": {"remove_extra_whitespaces": True},
    "single spaces, no prefix": {"add_dummy_prefix": False, "remove_extra_whitespaces": True},
}


def mistral(version: str) -> Path:
    """A model of Mistral's, out of their wheel, which is not imported."""
    spec = importlib.util.find_spec("mistral_common")
    assert spec is not None
    assert spec.submodule_search_locations
    [file] = (Path(spec.submodule_search_locations[0]) / "data").glob(version)
    return file


def trained(file: Path, **options: object) -> Path:
    """A model of type BPE, trained on next to nothing."""
    model = io.BytesIO()
    settings = {
        "model_type": "bpe",
        "byte_fallback": True,
        "normalization_rule_name": "identity",
        "vocab_size": 700,
        "character_coverage": 0.98,  # some characters have no piece
        "hard_vocab_limit": False,
        "num_threads": 1,
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 3), model_writer=model, **settings | options
    )
    file.write_bytes(model.getvalue())
    return file


def directory(folder: Path, model: Path, **files: object) -> Path:
    """A Hugging Face directory with no tokenizer but `model`; names of files lack their `.json`."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(model, folder / "tokenizer.model")
    for name, content in ({"config": CONFIG} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def types_of(model: sentencepiece.SentencePieceProcessor) -> list[int]:
    """As llama.cpp's converter finds them; pieces that merge nothing are user-defined."""
    tests = (
        (model.is_unknown, TokenType.UNKNOWN),
        (model.is_control, TokenType.CONTROL),
        (model.is_byte, TokenType.BYTE),
        (model.is_unused, TokenType.UNUSED),
    )
    return [
        next((kind for test, kind in tests if test(i)), None)
        or (TokenType.USER_DEFINED if user_defined(model, i) else TokenType.NORMAL)
        for i in range(len(model))
    ]


def user_defined(model: sentencepiece.SentencePieceProcessor, i: int) -> bool:
    """SentencePiece says it nowhere; but such a piece has score 0, as else the first merge only."""
    return model.get_score(i) == 0.0 and model.id_to_piece(i) in USER_DEFINED


USER_DEFINED = {*GEMMA["user_defined_symbols"]}  # type: ignore[misc]


def gguf(file: Path, model: Path, architecture: str = "llama", **keys: object) -> Path:
    """`model` as llama.cpp's converter writes it; `keys` that begin with `tokenizer.`, their dots
    written `__`, and `added` tokens, texts with their types.
    """
    processor = sentencepiece.SentencePieceProcessor(str(model))
    added: dict[str, TokenType] = keys.pop("added", {})  # type: ignore[assignment]
    tokens = [*map(processor.id_to_piece, range(len(processor))), *added]
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(4096)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(
        [*map(processor.get_score, range(len(processor))), *([-1000.0] * len(added))]
    )
    writer.add_token_types([*types_of(processor), *added.values()])
    keys = {
        "ggml__bos_token_id": processor.bos_id(),
        "ggml__eos_token_id": processor.eos_id(),
        **keys,
    }
    adders = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
    for key, value in keys.items():
        adders[type(value)](f"tokenizer.{key.replace('__', '.')}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


class Reference:
    """Whole tokens are cut out; SentencePiece itself encodes what is between them."""

    def __init__(self, model: Path) -> None:
        self.model = sentencepiece.SentencePieceProcessor(str(model))
        size = len(self.model)
        whole = [
            self.model.id_to_piece(i)
            for i in range(size)
            if self.model.is_control(i) or self.model.is_unknown(i)
        ]
        self._whole = re.compile("(" + "|".join(map(re.escape, whole)) + ")")

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for number, piece in enumerate(self._whole.split(text)):
            ids += [self.model.piece_to_id(piece)] if number % 2 else self.model.encode(piece)
        return ids
