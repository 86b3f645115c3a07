"""A GGUF file's metadata as `ModelFiles`: keys as llama.cpp reads them, its defaults included."""

from pathlib import Path
from typing import TypeVar

from shared.gguf_file import ModelFileError, read_gguf
from shared.model_types import ModelFiles
from shared.vocabulary import (
    BpeParts,
    SpmParts,
    TokenKinds,
    Vocabulary,
    byte_level,
    ends_of,
    token_kinds,
)

# Pre-tokenizers whose models want the beginning-of-text id where the file does not say.
_BOS_BY_DEFAULT = ("llama-bpe", "tekken")
# Of Phi-3, whose tokens take along the space after them; GGUF has no key for it.
_KEEP_SPACE = ("<unk>", "<s>", "<|endoftext|>")

T = TypeVar("T")


class _Metadata:
    """Typed reads of a GGUF file's metadata; a key that is missing or wrong is refused by name."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._values = read_gguf(file).metadata

    def get(self, key: str, kind: type[T], default: T) -> T:
        return self.need(key, kind) if key in self._values else default

    def need(self, key: str, kind: type[T]) -> T:
        if key not in self._values:
            raise ModelFileError(self.file, key, "missing")
        value: object = self._values[key]
        if isinstance(value, kind):
            return value
        raise ModelFileError(self.file, key, f"not of type {kind.__name__}")

    def need_list(self, key: str, kind: type[T]) -> list[T]:
        items = self.need(key, list)
        if not all(isinstance(item, kind) for item in items):
            raise ModelFileError(self.file, key, f"not a list of type {kind.__name__}")
        return items

    def token_id(self, name: str, size: int) -> int | None:
        """A special token's id, None if the file names none; `size` of the vocabulary."""
        key = f"tokenizer.ggml.{name}_token_id"
        if key not in self._values:
            return None
        token_id = self.need(key, int)
        if not 0 <= token_id < size:
            raise ModelFileError(self.file, key, f"{token_id} is outside the vocabulary")
        return token_id


def from_gguf(file: Path) -> ModelFiles:
    """The model in `file`. Raises `ModelFileError`."""
    metadata = _Metadata(file)
    architecture = metadata.need("general.architecture", str)
    tokens = metadata.need_list("tokenizer.ggml.tokens", str)
    types = metadata.need_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        reason = f"{len(types)} entries for {len(tokens)} tokens"
        raise ModelFileError(file, "tokenizer.ggml.token_type", reason)
    kinds, size = token_kinds(tokens, types), len(tokens)
    ids = {name: metadata.token_id(name, size) for name in ("bos", "eos", "unknown", "padding")}
    ends = {ids["eos"], metadata.token_id("eot", size), metadata.token_id("eom", size)}
    end_ids = ends_of(tokens, kinds.control) | {i for i in ends if i is not None}
    model = metadata.need("tokenizer.ggml.model", str)
    bpe = spm = None
    if model == "gpt2":
        bpe = _bpe_parts(metadata, tokens, kinds)
        vocabulary = _bpe_vocabulary(bpe, kinds.unused, end_ids)
    elif model == "llama":
        spm = _spm_parts(metadata, tokens, kinds, architecture)
        vocabulary = spm.vocabulary(end_ids)
    else:
        reason = f"{model!r} is not supported, only gpt2 (byte-level BPE) and llama (SentencePiece)"
        raise ModelFileError(file, "tokenizer.ggml.model", reason)
    wants_bos = bpe is None or bpe.pre in _BOS_BY_DEFAULT
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return ModelFiles(
        path=file,
        name=file.stem,
        architecture=architecture,
        max_model_len=metadata.need(f"{architecture}.context_length", int),
        vocabulary=vocabulary,
        bos_id=ids["bos"],
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", bool, wants_bos),
        chat_template=metadata.get("tokenizer.chat_template", str, ""),
        special_texts={
            name: tokens[i] for name, i in zip(names, ids.values(), strict=True) if i is not None
        },
        bpe=bpe,
        spm=spm,
    )


def _bpe_parts(metadata: _Metadata, tokens: list[str], kinds: TokenKinds) -> BpeParts:
    return BpeParts(
        pre=metadata.need("tokenizer.ggml.pre", str),
        tokens=tokens,
        merges=metadata.need_list("tokenizer.ggml.merges", str),
        control=kinds.control,
        user=kinds.user,
    )


def _bpe_vocabulary(parts: BpeParts, unused: frozenset[int], end_ids: set[int]) -> Vocabulary:
    whole = parts.control | parts.user
    raw = [t.encode() if i in whole else byte_level(t) for i, t in enumerate(parts.tokens)]
    shown = [b"" if i in unused else token for i, token in enumerate(raw)]
    return Vocabulary(shown, parts.control, end_ids)


def _spm_parts(
    metadata: _Metadata, tokens: list[str], kinds: TokenKinds, architecture: str
) -> SpmParts:
    eats = kinds.control if architecture == "phi3" else frozenset[int]()
    parts = SpmParts(
        # Rows that only fill up a matrix are called [PAD712]; as in llama.cpp nobody reads that.
        tokens=["" if i in kinds.unused else token for i, token in enumerate(tokens)],
        scores=metadata.need_list("tokenizer.ggml.scores", float),
        kinds=kinds,
        space_prefix=metadata.get("tokenizer.ggml.add_space_prefix", bool, True),
        single_spaces=metadata.get("tokenizer.ggml.remove_extra_whitespaces", bool, False),
        eats_right=frozenset(i for i in eats if tokens[i] not in _KEEP_SPACE),
    )
    if problem := parts.problem():
        raise ModelFileError(metadata.file, f"tokenizer.ggml.{problem[0]}", problem[1])
    return parts
