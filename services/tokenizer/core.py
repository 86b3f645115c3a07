"""The tokenizer's mailbox: a question in, its answer out. The same question, the same answer.

Megabytes of prompts take seconds. They are encoded in slices, one per tick, so that short questions
and heartbeats do not wait for them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from services.tokenizer.config import Config
from services.tokenizer.tokenizer import Tokenizer
from shared.core import Outbox
from shared.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    MeshError,
    Overloaded,
)
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
SLICE = 1 << 16  # characters, or ids, encoded at a time: tens of milliseconds
JOBS_MAX = 16  # questions that need more than one slice, each up to 7 MB
WIRE_MAX = 7 << 20  # bytes of ids, hashes or text in one answer; the bus takes 8 MB
ID_BYTES = 5  # four for the id, one for its share of a block hash
Asked = TypeVar("Asked", Generate, Detokenize)


@dataclass(slots=True, eq=False)
class Job:
    """A question on prompts, and what is done of it."""

    question: Generate
    until: float
    sources: list[str | bytes]  # last one first
    prompts: list[TokenizedPrompt] = field(default_factory=list)
    num_ids: int = 0


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
        self._jobs: dict[str, Job] = {}  # by request, the one whose turn is next first

    @property
    def num_jobs(self) -> int:
        """Questions that are half answered."""
        return len(self._jobs)

    def receive(self, message: ToTokenizer, now: float) -> None:
        match message:
            case Generate(request_id=known) if known in self._jobs:
                self._jobs[known].question = message  # asked again: what is done stays done
            case Generate():
                self._answer(message, lambda question: self._begin(question, now))
            case Detokenize():
                self._answer(message, self._detokenized)

    def tick(self, now: float) -> None:
        """The next slice of one question."""
        if self._jobs:
            job = self._jobs.pop(next(iter(self._jobs)))
            self._answer(job.question, lambda _: self._go_on(job, now))

    def _answer(self, question: Asked, answer: Callable[[Asked], Message | None]) -> None:
        """Send what `answer` returns or raises; None = there is more to do."""
        try:
            message = answer(question)
        except MeshError as error:
            self.counters[f"failed_{error.code}"] += 1
            message = Failed(
                request_id=question.request_id,
                choice=-1,
                epoch=question.attempt,
                code=error.code,
                detail=error.detail,
                param=error.param,
                retry_after_s=error.retry_after_s,
            )
        else:
            self.counters["answered"] += message is not None
        if message is not None:
            self.outbox.put(inbox(question.gateway), message)

    def _begin(self, question: Generate, now: float) -> Tokenized | None:
        if question.chat is not None:
            ids = self._checked(self._tokenizer.encode_chat(question.chat), "messages")
            return self._tokenized(question, [_prompt(ids, question.salt)])
        sources: Sequence[str | bytes] = question.texts or question.ids or ()
        if not 0 < len(sources) <= self._config.max_prompts:
            raise InvalidRequest(
                f"prompt must be 1 to {self._config.max_prompts} prompts, not {len(sources)}",
                param="prompt",
            )
        until = now + question.deadline_ms / 1000 if question.deadline_ms else float("inf")
        return self._go_on(Job(question, until, [*reversed(sources)]), now)

    def _go_on(self, job: Job, now: float) -> Tokenized | None:
        """One slice of `job`, which then waits for its next turn unless it is done."""
        if now > job.until:
            raise DeadlineExceeded("the prompts took too long to encode.")
        enough = job.num_ids + SLICE
        size = 0
        while job.sources and size < SLICE and job.num_ids < enough:
            source = job.sources.pop()
            size += len(source) if isinstance(source, str) else 0
            ids = self._checked(self._ids_of(source, job.question), "prompt")
            job.num_ids += len(ids)
            if job.num_ids * ID_BYTES > WIRE_MAX:
                raise InvalidRequest(
                    f"the prompts have more than {WIRE_MAX // ID_BYTES} tokens together",
                    param="prompt",
                )
            job.prompts.append(_prompt(ids, job.question.salt))
        if not job.sources:
            return self._tokenized(job.question, job.prompts)
        if len(self._jobs) >= JOBS_MAX:
            raise Overloaded("too many long prompts are being encoded.", retry_after_s=1.0)
        self._jobs[job.question.request_id] = job
        return None

    def _tokenized(self, question: Generate, prompts: list[TokenizedPrompt]) -> Tokenized:
        return Tokenized(
            request_id=question.request_id,
            attempt=question.attempt,
            tokenizer=self._instance,
            prompts=prompts,
            bad_words=self._bad_words(question.bad_words or []) or None,
            sampling_defaults=self._files.sampling_defaults,
        )

    def _bad_words(self, words: list[str]) -> list[bytes]:
        """The ids of each word after a space, at the beginning of a text, and inside one.

        The last is what follows a line break there: a vocabulary may put a space before the first
        word of a text, and none after a line break.
        """
        ways: dict[bytes, None] = {}
        opened = self._ids("\n")
        for word in words:
            bare = word.lstrip(" ") or word
            line = self._ids(f"\n{bare}")
            inside = line[len(opened) :] if line[: len(opened)] == opened else []
            found = [ids for ids in (self._ids(f" {bare}"), self._ids(bare), inside) if ids]
            if not found:
                raise InvalidRequest(f"bad_words: {word!r} has no tokens", param="bad_words")
            ways |= dict.fromkeys(map(pack_ids, found))
        return list(ways)

    def _ids(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

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
        text = vocabulary.text(ids, question.skip_special_tokens)
        if len(text.encode()) > WIRE_MAX:
            raise InvalidRequest(f"tokens: their text is over {WIRE_MAX} bytes", param="tokens")
        return Detokenized(
            request_id=question.request_id,
            attempt=question.attempt,
            tokenizer=self._instance,
            text=text,
        )


def _prompt(ids: list[int], salt: bytes) -> TokenizedPrompt:
    return TokenizedPrompt(pack_ids(ids), b"".join(block_hashes(ids, salt)))
