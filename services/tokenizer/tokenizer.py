"""Text to ids and back for one model, and chats to ids. A function; keeps no state."""

import jinja2
import tokenizers
from tokenizers import AddedToken, pre_tokenizers

from services.tokenizer.encoders import encoder_of
from services.tokenizer.shield import ControlTexts
from services.tokenizer.template import ChatTemplate
from shared.errors import ContextLengthExceeded, InvalidRequest
from shared.messages import ChatPrompt
from shared.model_files import ModelFileError, ModelFiles

WINDOW = 16384  # characters; several seconds of work are seen to be too much after a tenth of one
# What `lstrip` and `rstrip` of a token strip: Unicode's White_Space, as the library has it.
_SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008"
_SPACES += "\u2009\u200a\u2028\u2029\u202f\u205f\u3000"


class Tokenizer:
    """Encodes with the model's own vocabulary. Raises `ModelFileError` at construction."""

    def __init__(self, files: ModelFiles, template_cpu_s: float = 0.5) -> None:
        vocabulary = files.vocabulary
        self._files = files
        self._encoder = encoder_of(files)
        self._control = {vocabulary.text_of(i): i for i in sorted(vocabulary.special)}
        self._control.pop("", None)
        self._control_texts = ControlTexts(self._control)
        self._whole: dict[str, AddedToken] = {
            token.content: token for token in self._encoder.get_added_tokens_decoder().values()
        }
        self._first_word = _first_word(self._encoder)
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
        pieces = self._control_texts.split(text)
        for number, piece in enumerate(pieces):
            if len(ids) > self._files.max_model_len:
                raise self._too_long(text, "messages")
            if number % 2:  # a control token
                ids.append(self._control[piece])
                continue
            words = shield.reveal(piece)
            if number and self._whole[pieces[number - 1]].rstrip:
                words = words.lstrip(_SPACES)
            if number + 1 < len(pieces) and self._whole[pieces[number + 1]].lstrip:
                words = words.rstrip(_SPACES)
            if words:
                ids += self._encode(words, "messages", begins=number == 0)
        return ids

    def _encode(self, text: str, param: str, begins: bool = True) -> list[int]:
        """The ids of `text`, which `begins` the whole or goes on after a control token.

        What is far too long is refused after no more work than what fits: windows are counted
        first. A cut adds less ids than the longest token has bytes, and otherwise no text has twice
        as many ids in pieces as it has whole.
        """
        if self._first_word is not None:
            self._first_word.prepend_scheme = "first" if begins else "never"
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


def _first_word(encoder: tokenizers.Tokenizer) -> pre_tokenizers.Metaspace | None:
    """What puts a space before the first word of a text alone, if `encoder` has it: told by the
    place in the string, so a piece that is encoded by itself would pass for a beginning.
    """
    words = encoder.pre_tokenizer
    is_one = isinstance(words, pre_tokenizers.Metaspace) and words.prepend_scheme == "first"
    return words if is_one else None


def _compile(files: ModelFiles, cpu_s: float) -> ChatTemplate:
    try:
        return ChatTemplate(files.chat_template, files.special_texts, cpu_s)
    except jinja2.TemplateSyntaxError as error:
        raise ModelFileError(files.path, "chat template", str(error)) from error
