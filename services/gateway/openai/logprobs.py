"""Log probabilities as each endpoint shows them. JSON has no infinity: -inf becomes -9999."""

from typing import Any

from shared.messages import TokenText

FLOOR = -9999.0


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


def completion_logprobs(tokens: list[TokenText], offset: int) -> dict[str, Any]:
    """Four parallel lists; `offset` = characters of this choice before the first token.

    `top_logprobs` always has the chosen token, so up to one more entry than was asked for.
    """
    top: list[dict[str, float]] = []
    offsets: list[int] = []
    for token in tokens:
        best: dict[str, float] = {}
        for text, _, logprob in token.top:
            best.setdefault(text, clamp(logprob))
        best.setdefault(token.token, clamp(token.logprob))
        top.append(best)
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [clamp(token.logprob) for token in tokens],
        "top_logprobs": top,
        "text_offset": offsets,
    }
