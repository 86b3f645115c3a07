"""Encoders of the `tokenizers` library, made from what model files say. Nothing is guessed."""

import math
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from shared.model_files import BpeParts, ModelFileError, ModelFiles, SpmParts
from shared.vocabulary import SPACE

# How text is cut into words, by the name that a GGUF file gives. Sources: the tokenizer.json of
# Llama 3, Qwen 2 and 3, the tekken.json of Mistral Nemo; llama.cpp has the names.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")  # digits one by one
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORDS = {
    "llama-bpe": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "tekken": _TEKKEN,
}
_WHOLE_WORDS_FIRST = ("llama-bpe", "tekken")
_COMPOSED = ("qwen2", "deepseek-r1-qwen")


def encoder_of(files: ModelFiles) -> tokenizers.Tokenizer:
    """The encoder of a model. Raises `ModelFileError`."""
    if files.bpe is not None:
        return from_bpe(files.path, files.bpe)
    if files.spm is not None:
        return from_spm(files.path, files.spm)
    assert files.tokenizer_json is not None
    return _from_json(files.tokenizer_json)


def from_bpe(file: Path, parts: BpeParts) -> tokenizers.Tokenizer:
    """Byte-level BPE, its words cut as `parts.pre` says."""
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in parts.merges)]
    if not all(left and right for left, right in pairs):
        raise ModelFileError(file, "tokenizer.ggml.merges", "an entry is not a pair")
    pre_tokenizer = _pre_tokenizer(file, parts.pre)
    try:
        model = models.BPE(
            vocab={token: i for i, token in enumerate(parts.tokens)},
            merges=pairs,
            ignore_merges=parts.pre in _WHOLE_WORDS_FIRST,
        )
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(file, "tokenizer.ggml.merges", str(error)) from error
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = pre_tokenizer
    if parts.pre in _COMPOSED:
        encoder.normalizer = normalizers.NFC()
    encoder.add_special_tokens([_whole(parts.tokens[i], True) for i in sorted(parts.control)])
    encoder.add_tokens([_whole(parts.tokens[i], False) for i in sorted(parts.user)])
    return encoder


def _whole(text: str, special: bool, lstrip: bool = False, rstrip: bool = False) -> AddedToken:
    return AddedToken(text, special=special, normalized=False, lstrip=lstrip, rstrip=rstrip)


def _pre_tokenizer(file: Path, name: str) -> Any:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2":
            return byte_level
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, byte_level])
    if name not in _WORDS:
        reason = f"pre-tokenizer {name!r} is not known, only gpt-2, smollm, {', '.join(_WORDS)}"
        raise ModelFileError(file, "tokenizer.ggml.pre", reason)
    words = pre_tokenizers.Split(Regex(_WORDS[name]), behavior="isolated")
    no_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, no_regex])


def from_spm(file: Path, parts: SpmParts) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: text is not cut into words, what is no piece is written in bytes.

    Text between whole tokens is encoded like a text of its own, its space before it included: so
    do SentencePiece's callers (Llama's, Mistral's), llama.cpp and the first Hugging Face files.
    """
    tokens, kinds = parts.tokens, parts.kinds
    unknown = None if kinds.unknown is None else tokens[kinds.unknown]
    try:
        model = models.BPE(
            vocab={token: i for i, token in enumerate(tokens) if token},
            merges=_merges(parts),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=bool(kinds.byte),
        )
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(file, "vocabulary", str(error)) from error
    encoder = tokenizers.Tokenizer(model)
    prefix = [normalizers.Prepend(" ")] if parts.space_prefix else []
    steps = [*prefix, normalizers.Replace(" ", SPACE)]
    if parts.single_spaces:
        first = normalizers.Replace(Regex(r"\A +"), ""), normalizers.Replace(Regex(" +"), " ")
        steps = [*first, *steps, normalizers.Replace(Regex(rf"{SPACE}+\z"), "")]
    encoder.normalizer = normalizers.Sequence(steps)
    for ids, special in ((kinds.control, True), (kinds.user, False)):
        whole = [
            _whole(tokens[i], special, i in parts.eats_left, i in parts.eats_right)
            for i in sorted(ids)
            if tokens[i] and (special or SPACE not in tokens[i])  # merges make runs of spaces
        ]
        (encoder.add_special_tokens if special else encoder.add_tokens)(whole)
    return encoder


def _merges(parts: SpmParts) -> list[tuple[str, str]]:
    """Every way to make a piece of two, in the order that SentencePiece makes them.

    By score; of one piece's ways the one with the longest left side, as `transformers` has it
    (SentencePiece: the leftmost in the text; they differ where ways overlap, in runs of a letter).
    """
    tokens, kinds = parts.tokens, parts.kinds
    apart = kinds.control | kinds.byte | kinds.unused
    pieces = {
        token: math.inf if i in kinds.user else parts.scores[i]
        for i, token in enumerate(tokens)
        if i not in apart
    }
    ways = [
        (score, cut, piece)
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    ways.sort(key=lambda way: way[:2], reverse=True)  # stable: of equals the lower id goes first
    return [(piece[:cut], piece[cut:]) for _, cut, piece in ways]


def _from_json(file: Path) -> tokenizers.Tokenizer:
    try:
        encoder = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(file, "tokenizer", str(error)) from error
    encoder.no_truncation()
    encoder.no_padding()
    return encoder
