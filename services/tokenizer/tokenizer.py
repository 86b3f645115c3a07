"""Text to ids and back for one model, and chats to ids. A function; keeps no state."""

from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers

from services.tokenizer.shield import ControlTexts
from services.tokenizer.template import ChatTemplate
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import ChatPrompt
from shared.model_files import BpeParts, ModelFileError, ModelFiles

WINDOW = 16384  # characters; several seconds of work are seen to be too much after a tenth of one
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")  # digits one by one


class Tokenizer:
    """Encodes with the model's own vocabulary. Raises `ModelFileError` at construction."""

    def __init__(self, files: ModelFiles, template_cpu_s: float = 0.5) -> None:
        vocabulary = files.vocabulary
        self._files = files
        self._encoder = _from_parts(files.path, files.bpe) if files.bpe else _from_json(files)
        self._control = {vocabulary.text_of(i): i for i in sorted(vocabulary.special)}
        self._control.pop("", None)
        self._control_texts = ControlTexts(self._control)
        self._prefix = self._find_prefix()
        self._template = _compile(files, template_cpu_s) if files.chat_template else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """A whole prompt of the client's own making: control tokens written in it count.

        The beginning-of-text id is put before it unless it is there already.
        """
        self._encoder.encode_special_tokens = False
        ids = self._encode(text, "prompt")
        if add_special_tokens and ids[: len(self._prefix)] != self._prefix:
            ids = self._prefix + ids
        return ids

    def encode_chat(self, chat: ChatPrompt) -> list[int]:
        """A conversation through the template; only the template's control tokens count."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template", param="messages")
        text, shield = self._template.render(chat, self._control_texts)
        self._encoder.encode_special_tokens = True  # as ordinary text, that is
        ids: list[int] = []
        for number, piece in enumerate(self._control_texts.split(text)):
            if len(ids) > self._files.max_model_len:
                raise self._too_long(text, "messages")
            if number % 2:  # a control token
                ids.append(self._control[piece])
            elif piece:
                ids += self._encode(shield.reveal(piece), "messages")
        return ids

    def _encode(self, text: str, param: str) -> list[int]:
        """The ids of `text`; what is far too long is refused after no more work than what fits.

        Windows are counted first. A cut adds less ids than the longest token has bytes, and
        otherwise no text has twice as many ids in pieces as it has whole.
        """
        limit, longest = self._files.max_model_len, self._files.vocabulary.token_bytes_max
        if len(text) > limit * longest:
            raise self._too_long(text, param)
        most, count = 2 * limit, 0
        for start in range(0, len(text) if len(text) > WINDOW else 0, WINDOW):
            count += len(self._encoder.encode(text[start : start + WINDOW]))
            most += longest
            if count > most:
                raise self._too_long(text, param)
        ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        return ids

    def _too_long(self, text: str, param: str) -> ContextLengthExceeded:
        return ContextLengthExceeded(
            f"This model's maximum context length is {self._files.max_model_len} tokens. "
            f"However, your input of {len(text)} characters is longer than that.",
            param=param,
        )

    def _find_prefix(self) -> list[int]:
        """The ids that belong before a text: what a Hugging Face post-processor puts there."""
        files = self._files
        if files.tokenizer_json is None:
            return [files.bos_id] if files.add_bos and files.bos_id is not None else []
        bare = self._encoder.encode("a", add_special_tokens=False).ids
        full = self._encoder.encode("a").ids
        return list(full[: full.index(bare[0])]) if bare and bare[0] in full else []


def _from_parts(file: Path, parts: BpeParts) -> tokenizers.Tokenizer:
    pairs = [(left, right) for left, _, right in (m.partition(" ") for m in parts.merges)]
    if not all(left and right for left, right in pairs):
        raise ModelFileError(file, "tokenizer.ggml.merges", "an entry is not a pair")
    pre_tokenizer = _pre_tokenizer(file, parts.pre)
    try:
        model = models.BPE(
            vocab={token: i for i, token in enumerate(parts.tokens)},
            merges=pairs,
            ignore_merges=parts.pre == "llama-bpe",
        )
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(file, "tokenizer.ggml.merges", str(error)) from error
    encoder = tokenizers.Tokenizer(model)
    encoder.pre_tokenizer = pre_tokenizer
    if parts.pre == "qwen2":
        encoder.normalizer = normalizers.NFC()
    encoder.add_special_tokens([_whole(parts.tokens[i], True) for i in sorted(parts.control)])
    encoder.add_tokens([_whole(parts.tokens[i], False) for i in sorted(parts.user)])
    return encoder


def _whole(text: str, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False)


def _pre_tokenizer(file: Path, name: str) -> Any:
    """How text is cut into words, by the name the file gives; never guessed."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    match name:
        case "gpt-2":
            return byte_level
        case "smollm":
            digits = pre_tokenizers.Digits(individual_digits=True)
            return pre_tokenizers.Sequence([digits, byte_level])
        case "llama-bpe" | "qwen2":
            pattern = _LLAMA3 if name == "llama-bpe" else _QWEN2
            words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
            no_regex = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            return pre_tokenizers.Sequence([words, no_regex])
    raise ModelFileError(file, "tokenizer.ggml.pre", f"pre-tokenizer {name!r} is not known")


def _from_json(files: ModelFiles) -> tokenizers.Tokenizer:
    assert files.tokenizer_json is not None
    try:
        encoder = tokenizers.Tokenizer.from_file(str(files.tokenizer_json))
    except Exception as error:  # the library raises nothing narrower
        raise ModelFileError(files.tokenizer_json, "tokenizer", str(error)) from error
    encoder.no_truncation()
    encoder.no_padding()
    return encoder


def _compile(files: ModelFiles, cpu_s: float) -> ChatTemplate:
    try:
        return ChatTemplate(files.chat_template, files.special_texts, cpu_s)
    except jinja2.TemplateSyntaxError as error:
        raise ModelFileError(files.path, "chat template", str(error)) from error
