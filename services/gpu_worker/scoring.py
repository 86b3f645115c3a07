"""Rows of logits, and what one says of an id: logprob, rank, and the ids that are better."""

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from services.gpu_worker.drawing import leaders
from services.gpu_worker.sequence import Score
from shared.ids import pack_ids
from shared.messages import TokenLogprobs


class Logits(NamedTuple):
    """Logits of some rows, and what whoever computed them saw on the way."""

    values: Tensor  # fp32 [rows, vocab]; [rows, 0] where nobody asked for them
    best: list[int]  # an id of the largest
    sound: list[bool]  # no NaN, no infinity

    @classmethod
    def of(cls, values: Tensor) -> Self:
        """Of `values` alone. NaN or an infinity makes a row's sum one, and no sound model's logits
        overflow it.
        """
        best = values.numpy().argmax(-1)  # torch takes 6 times as long
        return cls(values, best.tolist(), values.sum(-1).isfinite().tolist())


def token_logprobs(logprobs: Tensor, token_id: int, count: int) -> TokenLogprobs:
    """Of `token_id` and the `count` best in one row [vocab]; of those that tie the first."""
    values = logprobs.numpy()
    ids = leaders(values, max(1, count))
    best = ids[np.argsort(-values[ids], kind="stable")[:count]]
    return TokenLogprobs(
        float(values[token_id]), pack_ids(best.tolist()), tuple(values[best].tolist())
    )


def score(logits: Tensor, ids: list[int], count: int) -> list[Score]:
    """Of one id per row of `logits` fp32 [rows, vocab], with the `count` best of that row."""
    logprobs = torch.log_softmax(logits, dim=-1)
    better = (logprobs > logprobs.gather(1, torch.tensor(ids)[:, None])).sum(-1).tolist()
    return [
        Score(token_logprobs(of_row, token_id, count), 1 + ahead)
        for of_row, token_id, ahead in zip(logprobs, ids, better, strict=True)
    ]
