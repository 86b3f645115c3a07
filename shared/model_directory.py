"""A Hugging Face directory as `ModelFiles`.

Reads config.json, tokenizer.json or else tokenizer.model, and where present tokenizer_config.json,
added_tokens.json, generation_config.json and chat_template.jinja.
"""

from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from shared.gguf_file import ModelFileError
from shared.model_types import ModelFiles
from shared.sampling import SamplingDefaults
from shared.spm_file import SpmFile, read_spm
from shared.vocabulary import MAX_VOCABULARY, Vocabulary, byte_level, ends_of, piece_bytes

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class _AddedToken(Struct):
    content: str
    id: int = -1
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Bpe(Struct):
    vocab: dict[str, int]
    type: str = "BPE"
    byte_fallback: bool = False


class _Decoder(Struct):
    type: str = ""
    decoders: list["_Decoder"] = []
    content: str = ""
    start: int = 0
    prepend_scheme: str = "always"

    @property
    def strips_space(self) -> bool:
        """Whether a whole text loses the space that it begins with."""
        if self.type == "Metaspace":
            return self.prepend_scheme != "never"
        strips = self.type == "Strip" and self.content == " " and self.start > 0
        return strips or any(decoder.strips_space for decoder in self.decoders)


class _TokenizerJson(Struct):
    model: _Bpe
    added_tokens: list[_AddedToken] = []
    decoder: _Decoder | None = None


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
    add_bos_token: bool | None = None
    added_tokens_decoder: dict[int, _AddedToken] = {}

    @property
    def special_texts(self) -> dict[str, str]:
        texts = {name: _token_text(getattr(self, name)) for name in _NAMES}
        return {name: text for name, text in texts.items() if text}


def read_json(file: Path, kind: Any, optional: bool = False) -> Any:
    """`file` as `kind`, or the defaults of `kind` where `optional` and absent. Raises
    `ModelFileError`.
    """
    if optional and not file.exists():
        return kind()
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise ModelFileError(file, "file", str(error)) from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ModelFileError(file, "content", str(error)) from error


def from_directory(folder: Path) -> ModelFiles:
    """The model in `folder`. Raises `ModelFileError`."""
    config: _Config = read_json(folder / "config.json", _Config)
    texts: _TokenizerConfig = read_json(
        folder / "tokenizer_config.json", _TokenizerConfig, optional=True
    )
    generation: _GenerationConfig = read_json(
        folder / "generation_config.json", _GenerationConfig, optional=True
    )
    ends = _id_set(generation.eos_token_id) or _id_set(config.eos_token_id)
    common = ModelFiles(
        path=folder,
        name=folder.name,
        architecture=config.model_type,
        max_model_len=config.max_position_embeddings,
        vocabulary=Vocabulary(()),
        bos_id=config.bos_token_id,
        add_bos=bool(texts.add_bos_token),
        chat_template=_template(folder, texts),
        special_texts=texts.special_texts,
        sampling_defaults=generation.defaults,
    )
    if not (folder / "tokenizer.json").exists() and (folder / "tokenizer.model").exists():
        return _with_spm(common, texts, ends)
    return _with_tokenizer_json(common, ends)


def _with_tokenizer_json(common: ModelFiles, ends: set[int]) -> ModelFiles:
    file = common.path / "tokenizer.json"
    tokenizer: _TokenizerJson = read_json(file, _TokenizerJson)
    model, added = tokenizer.model, tokenizer.added_tokens
    if model.type != "BPE":
        reason = f"model.type {model.type!r} is not supported, only BPE is"
        raise ModelFileError(file, "model.type", reason)
    ids = [*model.vocab.values(), *(token.id for token in added)]
    if not ids or min(ids) < 0 or max(ids) >= MAX_VOCABULARY:
        raise ModelFileError(file, "model.vocab", f"needs ids within 0..{MAX_VOCABULARY - 1}")
    spell = piece_bytes if model.byte_fallback else byte_level
    raw = {i: spell(token) for token, i in model.vocab.items()}
    for token in added:
        plain = token.special or not model.byte_fallback
        raw[token.id] = token.content.encode() if plain else piece_bytes(token.content)
    tokens = [raw.get(i, b"") for i in range(max(raw) + 1)]  # the file may skip ids
    named = {token.id: token.content for token in added if token.special}
    contents = [named.get(i, "") for i in range(max(raw) + 1)]
    vocabulary = Vocabulary(
        tokens,
        named,
        ends | ends_of(contents, named),
        sentencepiece=model.byte_fallback,
        strips_space=tokenizer.decoder is not None and tokenizer.decoder.strips_space,
    )
    return structs.replace(common, vocabulary=vocabulary, tokenizer_json=file)


def _with_spm(common: ModelFiles, texts: _TokenizerConfig, ends: set[int]) -> ModelFiles:
    file = common.path / "tokenizer.model"
    spm = _with_added(read_spm(file), common.path, texts.added_tokens_decoder)
    tokens, control = spm.parts.tokens, spm.parts.kinds.control
    ids = (spm.bos_id, spm.eos_id, spm.parts.kinds.unknown, spm.pad_id)
    named = {name: tokens[i] for name, i in zip(_NAMES, ids, strict=True) if i is not None}
    special_texts = named | common.special_texts
    by_text = {tokens[i]: i for i in control}
    if not ends and "eos_token" in special_texts:
        ends = {by_text.get(special_texts["eos_token"], -1)} - {-1}
    return structs.replace(
        common,
        vocabulary=spm.parts.vocabulary(ends | ends_of(tokens, control)),
        bos_id=by_text.get(special_texts.get("bos_token", "")),
        # As `LlamaTokenizer` has it where the file does not say.
        add_bos=texts.add_bos_token is not False,
        special_texts=special_texts,
        spm=spm.parts,
    )


def _with_added(spm: SpmFile, folder: Path, listed: dict[int, _AddedToken]) -> SpmFile:
    """`spm` with the tokens that were added to it afterwards, or changed."""
    file = folder / "added_tokens.json"
    old: dict[str, int] = read_json(file, dict[str, int], optional=True)
    added = {i: _AddedToken(text, special=True) for text, i in old.items()} | listed
    if not added:
        return spm
    if min(added) < 0 or max(added) >= MAX_VOCABULARY:
        reason = f"added tokens need ids within 0..{MAX_VOCABULARY - 1}"
        raise ModelFileError(folder / "tokenizer_config.json", "added_tokens_decoder", reason)
    parts, kinds = spm.parts, spm.parts.kinds
    more = max(0, max(added) + 1 - len(parts.tokens))
    tokens = parts.tokens + [""] * more
    for i, token in added.items():
        tokens[i] = token.content
    special = {i for i, token in added.items() if token.special}
    changed = structs.replace(
        parts,
        tokens=tokens,
        scores=parts.scores + [0.0] * more,
        kinds=kinds._replace(
            control=kinds.control - {*added} | special,
            user=kinds.user - {*added} | ({*added} - special),
        ),
        eats_left=frozenset(i for i, token in added.items() if token.lstrip),
        eats_right=frozenset(i for i, token in added.items() if token.rstrip),
    )
    if problem := changed.problem():
        raise ModelFileError(folder / "tokenizer_config.json", "added_tokens_decoder", problem[1])
    return spm._replace(parts=changed)


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
