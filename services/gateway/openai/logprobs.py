"""Log probabilities as each endpoint shows them. JSON has no infinity: -inf becomes -9999."""

import codecs
from typing import Any

from shared.messages import PromptToken, TokenText

FLOOR = -9999.0
SKIP_MAX = 32  # bytes of a text that a normalizer may have changed before its tokens fit it again
_UTF8 = codecs.getincrementaldecoder("utf-8")


def clamp(logprob: float) -> float:
    """`logprob`, or the floor for what JSON cannot say (-inf, NaN)."""
    return max(FLOOR, logprob)


def chat_logprobs(tokens: list[TokenText]) -> dict[str, Any]:
    """One entry per id, also for ids whose text is held back; `bytes` are the token's own."""
    return {
        "content": [
            {
                "token": token.token,
                "logprob": clamp(token.logprob),
                "bytes": list(token.raw),
                "top_logprobs": [
                    {"token": text, "logprob": clamp(logprob), "bytes": list(raw)}
                    for text, raw, logprob in token.top
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def prompt_logprobs(tokens: list[PromptToken], count: int) -> list[dict[str, Any] | None]:
    """For each id of a prompt itself and the `count` best, by id, as vLLM has it; null first."""
    shown: list[dict[str, Any] | None] = []
    for token in tokens:
        if token.logprob is None:
            shown.append(None)
            continue
        by_id = {str(token.token_id): _ranked(token.logprob, token.rank, token.token)}
        for rank, (token_id, text, _, logprob) in enumerate(token.top[:count], 1):
            by_id.setdefault(str(token_id), _ranked(logprob, rank, text))
        shown.append(by_id)
    return shown


def _ranked(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": clamp(logprob), "rank": rank, "decoded_token": text}


class CompletionLists:
    """The four parallel lists of one choice's completion, over all chunks of its stream.

    `text_offset` = characters of the choice's text before the token; a token that goes on with a
    character begins where that does. `top_logprobs` always has the token itself, so up to one more
    entry than was asked for.
    """

    def __init__(self, echo: str, count: int) -> None:
        self._echo = echo
        self._count = count  # of alternatives
        self._offset = len(echo)
        self._decoder = _UTF8("replace")

    def take(self, prompt: list[PromptToken], tokens: list[TokenText]) -> dict[str, Any]:
        """The lists of these tokens: of an echoed prompt first, null where it has no logprob."""
        offsets = prompt_offsets(prompt, self._echo)
        tops = [[(text, p) for _, text, _, p in told.top[: self._count]] for told in prompt]
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(token.raw))
            tops.append([(text, p) for text, _, p in token.top])
        shown: list[PromptToken | TokenText] = [*prompt, *tokens]
        return {
            "tokens": [told.token for told in shown],
            "token_logprobs": [None if p is None else clamp(p) for p in (t.logprob for t in shown)],
            "top_logprobs": [_best(told, top) for told, top in zip(shown, tops, strict=True)],
            "text_offset": offsets,
        }


def _best(told: PromptToken | TokenText, top: list[tuple[str, float]]) -> dict[str, float] | None:
    """The alternatives by text, best first, and the token itself; None where it has no logprob."""
    if told.logprob is None:
        return None
    best: dict[str, float] = {}
    for text, logprob in [*top, (told.token, told.logprob)]:
        best.setdefault(text, clamp(logprob))
    return best


def prompt_offsets(tokens: list[PromptToken], text: str) -> list[int]:
    """Where each token of a prompt begins in its text, in characters.

    Tokens may have what the text has not (a begin token, a space before the first word), and a
    normalizer may have changed what they were made of: whatever does not fit takes no room.
    """
    raw = text.encode()
    offsets: list[int] = []
    decoder, characters, position = _UTF8("replace"), 0, 0
    for number, token in enumerate(tokens):
        piece = token.raw
        if position == 0 and not raw.startswith(b" "):
            piece = piece.removeprefix(b" ")
        reach = len(piece) + (SKIP_MAX if number else 0)
        start = raw.find(piece, position, position + reach) if piece else -1
        if start > position:
            characters += len(decoder.decode(raw[position:start]))
        offsets.append(characters)
        if start >= 0:
            characters += len(decoder.decode(piece))
            position = start + len(piece)
    return offsets
