"""Turning the input of a new session into ids: one live tokenizer, then the next. Pure."""

from dataclasses import dataclass, field

from services.gateway.peers import Tokenizers
from services.gateway.session import Session
from shared.core import Outbox
from shared.errors import MeshError, Unavailable
from shared.messages import Beat, Tokenized, encode
from shared.subjects import inbox

TRIES_MAX = 3
PATIENCE_S = 0.3  # for the first answer; a millisecond more for each KB of input
PATIENCE_GROWS = 4  # a tokenizer that beats is busy, not lost: 0.3, 1.2, 4.8 s
BEHIND_S = 0.005  # more for each question of ours before it: asking again would double the work
NOBODY_S = 5.0  # how long a session waits for any tokenizer to be there


@dataclass(slots=True, eq=False)
class Question:
    """A session whose input is not ids yet. `tokenizer` "" = nobody has been asked."""

    session: Session
    opened_at: float
    tokenizer: str = ""
    attempt: int = 0
    counted: int = 0  # tries, less those made while we were cut off
    asked_at: float = 0.0
    until: float = 0.0
    tried: list[str] = field(default_factory=list)


class Tokenizing:
    """All open questions of one gateway. `tick` and the rest return what fails."""

    def __init__(self, gateway: str, outbox: Outbox) -> None:
        self.tokenizers = Tokenizers()
        self.heard_at = 0.0  # the last message from anybody
        self._gateway = gateway
        self._outbox = outbox
        self._open: dict[str, Question] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def begin(self, session: Session, now: float) -> None:
        self._open[session.spec.request_id] = Question(session, now)

    def ask(self, request_id: str, now: float) -> MeshError | None:
        """Ask a tokenizer, unless one is being waited for. The error that ends the session."""
        question = self._open[request_id]
        if question.tokenizer in self.tokenizers and now < question.until:
            return None
        if question.tokenizer and self.heard_at <= question.asked_at:
            question.counted -= 1  # nor has anybody else been heard: it is our own connection
        self._give_up(question)
        if question.counted >= TRIES_MAX:
            return Unavailable(f"no tokenizer answered in {TRIES_MAX} tries.", retry_after_s=1.0)
        tokenizer = self.tokenizers.choose(question.tried)
        if not tokenizer:
            if now - question.opened_at < NOBODY_S:
                return None
            return Unavailable("no tokenizer is up.", retry_after_s=1.0)
        question.tokenizer = tokenizer
        question.asked_at = now
        question.attempt += 1
        question.counted += 1
        question.tried.append(tokenizer)
        behind = self.tokenizers.asked(tokenizer)
        message = question.session.generate(self._gateway, question.attempt, now)
        self._outbox.put(inbox(tokenizer), message)
        patience_s = PATIENCE_S * PATIENCE_GROWS ** (question.counted - 1) + BEHIND_S * behind
        question.until = now + patience_s + len(encode(message)) / 1024 * 0.001
        return None

    def answered(self, message: Tokenized) -> Session | None:
        """The session that `message` gives ids to; None for a duplicate or a stranger."""
        session = self.close(message.request_id)
        if session is not None:
            session.tokenized(message)
        return session

    def close(self, request_id: str) -> Session | None:
        """Forget a question, whatever came of it."""
        question = self._open.pop(request_id, None)
        if question is None:
            return None
        self._give_up(question)
        return question.session

    def failed(self, request_id: str, attempt: int) -> None:
        """A tokenizer cannot answer this try: the next is asked at the next tick."""
        if attempt == self._open[request_id].attempt:
            self._give_up(self._open[request_id])

    def beat(self, beat: Beat, now: float) -> None:
        if beat.role == "tokenizer":
            self.tokenizers.beat(beat, now)

    def died(self, instance: str) -> None:
        """Whoever waits for `instance` asks the next at the next tick."""
        self.tokenizers.drop(instance)
        for question in self._open.values():
            if question.tokenizer == instance:
                question.tokenizer = ""

    def tick(self, now: float) -> list[tuple[str, MeshError]]:
        """Ask whoever is due. Sessions that end here, and why."""
        self.tokenizers.drop_silent(now)
        ends = [(request_id, self.ask(request_id, now)) for request_id in list(self._open)]
        return [(request_id, error) for request_id, error in ends if error is not None]

    def restart(self, now: float) -> None:
        """We slept or were cut off: an open try may have failed for our own sake."""
        self.tokenizers.restart(now)
        for question in self._open.values():
            question.opened_at = now
            if question.tokenizer:
                self._give_up(question)
                question.counted -= 1

    def _give_up(self, question: Question) -> None:
        self.tokenizers.answered(question.tokenizer)
        question.tokenizer = ""
