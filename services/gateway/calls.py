"""Questions to a tokenizer that are not about a session: `/tokenize`, `/detokenize`, echo. Pure."""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from shared.core import Outbox
from shared.errors import ERRORS, MeshError, Overloaded, Unavailable
from shared.messages import Detokenize, Detokenized, Failed, Generate, ToGateway, Tokenized, encode
from shared.subjects import inbox

PATIENCE_S = 0.5  # before the first re-ask; a silent tokenizer is no longer chosen after 1 s
TRIES_MAX = 4  # waits of 0.5, 1, 2, 4 s

Question = Generate | Detokenize
Answered = Callable[[Tokenized | Detokenized | MeshError], None]


@dataclass(slots=True, eq=False)
class Call:
    """One open question; `message.attempt` counts the tries."""

    message: Question
    answered: Answered
    patience_s: float
    due: float


class Calls:
    """At most `limit` open questions by request id. `choose` names a tokenizer, "" for none."""

    def __init__(self, outbox: Outbox, choose: Callable[[], str], limit: int) -> None:
        self._outbox = outbox
        self._choose = choose
        self._limit = limit
        self._open: dict[str, Call] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, message: Question, answered: Answered, now: float) -> None:
        """Ask; `answered` is called once, unless `forget` comes first."""
        if len(self._open) >= self._limit:
            answered(Overloaded("too many questions are open here.", retry_after_s=1.0))
            return
        patience_s = PATIENCE_S + len(encode(message)) / 1024 * 0.001
        call = Call(message, answered, patience_s, due=now)
        self._open[message.request_id] = call
        self._ask(call, now)

    def forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)

    def receive(self, message: ToGateway) -> bool:
        """Take an answer; False = it is not about a question of ours."""
        if not isinstance(message, Tokenized | Detokenized | Failed):
            return False
        call = self._open.pop(message.request_id, None)
        if call is None:
            return False
        if isinstance(message, Failed):
            kind = ERRORS.get(message.code, MeshError)
            call.answered(kind(message.detail, param=message.param))
        else:
            call.answered(message)
        return True

    def tick(self, now: float) -> None:
        """Ask again where no answer came in time."""
        for call in [call for call in self._open.values() if call.due <= now]:
            self._ask(call, now)

    def restart(self, now: float) -> None:
        """Our own connection was down: the silence so far says nothing."""
        for call in self._open.values():
            call.due = now + call.patience_s

    def _ask(self, call: Call, now: float) -> None:
        if call.message.attempt >= TRIES_MAX:
            self.forget(call.message.request_id)
            call.answered(Unavailable("no tokenizer answered.", retry_after_s=1.0))
            return
        call.due = now + call.patience_s * 2**call.message.attempt
        call.message = replace(call.message, attempt=call.message.attempt + 1)
        tokenizer = self._choose()
        if tokenizer:
            self._outbox.put(inbox(tokenizer), call.message)
