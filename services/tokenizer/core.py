"""The tokenizer's mailbox: a question in, its answer out. The same question, the same answer."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from services.tokenizer.config import Config
from services.tokenizer.tokenizer import Tokenizer
from shared.core import Outbox
from shared.errors import ContextLengthExceeded, InvalidRequest, MeshError
from shared.ids import pack_ids, unpack_ids
from shared.kv import block_hashes
from shared.messages import (
    Detokenize,
    Detokenized,
    Failed,
    Generate,
    Message,
    Tokenized,
    TokenizedPrompt,
    ToTokenizer,
)
from shared.model_files import ModelFiles
from shared.subjects import inbox

DEFAULTS = Config()
Asked = TypeVar("Asked", Generate, Detokenize)


class TokenizerCore:
    """Answers `Generate` with `Tokenized` and `Detokenize` with `Detokenized`, or with `Failed`
    for the whole request (`choice` -1, `epoch` the attempt). Raises `ModelFileError` at once.
    """

    def __init__(self, instance: str, files: ModelFiles, config: Config = DEFAULTS) -> None:
        self.outbox = Outbox()
        self.counters: Counter[str] = Counter()  # answered, failed_<code>
        self._instance = instance
        self._files = files
        self._config = config
        self._tokenizer = Tokenizer(files, config.template_cpu_s)

    def receive(self, message: ToTokenizer, now: float) -> None:  # noqa: ARG002 shape of a core
        match message:
            case Generate():
                answer = self._answered(message, self._tokenized)
            case Detokenize():
                answer = self._answered(message, self._detokenized)
            case _:
                return  # `Died`: whom to answer is in each question
        self.outbox.put(inbox(message.gateway), answer)

    def tick(self, now: float) -> None:
        """Nothing waits here."""

    def _answered(self, question: Asked, answer: Callable[[Asked], Message]) -> Message:
        try:
            message = answer(question)
        except MeshError as error:
            self.counters[f"failed_{error.code}"] += 1
            return Failed(
                request_id=question.request_id,
                choice=-1,
                epoch=question.attempt,
                code=error.code,
                detail=error.detail,
                param=error.param,
            )
        self.counters["answered"] += 1
        return message

    def _tokenized(self, question: Generate) -> Tokenized:
        return Tokenized(
            request_id=question.request_id,
            attempt=question.attempt,
            tokenizer=self._instance,
            prompts=[
                TokenizedPrompt(pack_ids(ids), b"".join(block_hashes(ids, question.salt)))
                for ids in self._prompts(question)
            ],
        )

    def _prompts(self, question: Generate) -> list[list[int]]:
        if question.chat is not None:
            return [self._checked(self._tokenizer.encode_chat(question.chat), "messages")]
        sources: Sequence[str | bytes] = question.texts or question.ids or ()
        if not 0 < len(sources) <= self._config.max_prompts:
            raise InvalidRequest(
                f"prompt must be 1 to {self._config.max_prompts} prompts, not {len(sources)}",
                param="prompt",
            )
        return [self._checked(self._ids_of(source, question), "prompt") for source in sources]

    def _ids_of(self, source: str | bytes, question: Generate) -> list[int]:
        if isinstance(source, str):
            return self._tokenizer.encode(source, question.add_special_tokens)
        try:
            return unpack_ids(source)
        except ValueError as error:
            raise InvalidRequest("prompt: ids are packed as u32", param="prompt") from error

    def _checked(self, ids: list[int], param: str) -> list[int]:
        """`ids` if the model can take them: some, within the vocabulary, no more than fit."""
        size, limit = self._files.vocabulary.size, self._files.max_model_len
        if not ids:
            raise InvalidRequest(f"{param} is empty", param=param)
        if len(ids) > limit:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {limit} tokens. "
                f"However, your {param} has {len(ids)} tokens.",
                param=param,
            )
        if max(ids) >= size:
            raise InvalidRequest(
                f"{param}: token id {max(ids)} is outside the vocabulary of {size}", param=param
            )
        return ids

    def _detokenized(self, question: Detokenize) -> Detokenized:
        vocabulary = self._files.vocabulary
        try:
            ids = unpack_ids(question.ids)
        except ValueError as error:
            raise InvalidRequest("tokens: ids are packed as u32", param="tokens") from error
        outside = max(ids, default=0)
        if outside >= vocabulary.size:
            raise InvalidRequest(
                f"tokens: id {outside} is outside the vocabulary of {vocabulary.size}",
                param="tokens",
            )
        return Detokenized(
            request_id=question.request_id,
            attempt=question.attempt,
            tokenizer=self._instance,
            text=vocabulary.text(ids, question.skip_special_tokens),
        )
