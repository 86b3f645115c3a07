"""What a row of logits says of one id: its logprob, its rank, and the ids that are better."""

import torch
from torch import Tensor

from services.gpu_worker.sequence import Score
from shared.ids import pack_ids
from shared.messages import TokenLogprobs


def are_sound(logits: Tensor) -> Tensor:
    """Which rows of [rows, vocab] hold neither NaN nor an infinity: either makes the sum one, and
    no sound model's logits overflow it.
    """
    return logits.sum(-1).isfinite()


def token_logprobs(logprobs: Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Of `token_id` and the `count` best in one row [vocab]."""
    best = logprobs.topk(min(count, len(logprobs)))
    top_ids, top_logprobs = pack_ids(best.indices.tolist()), tuple(best.values.tolist())
    return TokenLogprobs(logprobs[token_id].item(), top_ids, top_logprobs)


def score(logits: Tensor, ids: list[int], count: int) -> list[Score]:
    """Of one id per row of `logits` fp32 [rows, vocab], with the `count` best of that row."""
    logprobs = torch.log_softmax(logits, dim=-1)
    better = (logprobs > logprobs.gather(1, torch.tensor(ids)[:, None])).sum(-1).tolist()
    return [
        Score(token_logprobs(of_row, token_id, count), 1 + ahead)
        for of_row, token_id, ahead in zip(logprobs, ids, better, strict=True)
    ]
