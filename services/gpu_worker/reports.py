"""What a worker says: to gateways at once, to detokenizers and schedulers once per step."""

from collections import defaultdict
from typing import NamedTuple

from services.gpu_worker.legs import Leg, LegKey
from shared.core import Outbox
from shared.errors import InvalidRequest, MeshError
from shared.ids import count_ids
from shared.messages import (
    Ended,
    EndedLeg,
    Failed,
    Renewed,
    RenewedLeg,
    RouteLost,
    Started,
    StepDone,
    StepRecord,
)
from shared.subjects import inbox


class Address(NamedTuple):
    """One epoch of a leg, and the gateway that hears of it."""

    gateway: str
    key: LegKey
    epoch: int


class Reports:
    """Turns what happened to legs into messages; `flush` sends what is gathered per step."""

    def __init__(self, instance: str, outbox: Outbox) -> None:
        self._instance = instance
        self._outbox = outbox
        self._records: defaultdict[str, list[StepRecord]] = defaultdict(list)  # by detokenizer
        self._ended: defaultdict[str, list[EndedLeg]] = defaultdict(list)  # by scheduler

    def started(self, leg: Leg, num_cached_tokens: int, *, adopted: bool = False) -> None:
        started = Started(
            request_id=leg.key[0],
            choice=leg.key[1],
            epoch=leg.epoch,
            worker=self._instance,
            detokenizer=leg.detokenizer,
            num_cached_tokens=num_cached_tokens,
            adopted=adopted,
        )
        self._outbox.put(inbox(leg.gateway), started)

    def failed(self, address: Address, error: MeshError, *, started: bool) -> None:
        """What is the client's fault fails everywhere; anything else may go better elsewhere."""
        failed = Failed(
            request_id=address.key[0],
            choice=address.key[1],
            epoch=address.epoch,
            code=error.code,
            detail=error.detail,
            retryable=not isinstance(error, InvalidRequest),
            started=started,
            param=error.param,
            retry_after_s=error.retry_after_s,
        )
        self._outbox.put(inbox(address.gateway), failed)

    def route_lost(self, address: Address, reason: str) -> None:
        request_id, choice = address.key
        lost = RouteLost(request_id=request_id, choice=choice, epoch=address.epoch, reason=reason)
        self._outbox.put(inbox(address.gateway), lost)

    def renewed(self, gateway: str, answers: list[RenewedLeg]) -> None:
        self._outbox.put(inbox(gateway), Renewed(holder=self._instance, legs=answers))

    def new_ids(self, leg: Leg, now: float) -> None:
        """Report the ids of `leg` that were not sent yet."""
        while leg.has_news:
            self._records[leg.detokenizer].append(leg.take_record(now))

    def ended(self, scheduler: str, leg: EndedLeg) -> None:
        self._ended[scheduler].append(leg)

    def flush(self, step: int) -> None:
        """One `StepDone` per detokenizer and one `Ended` per scheduler. A record of many ids, or
        with the logprobs of a whole prompt, goes alone: several could be too large for the bus.
        """
        for detokenizer, records in self._records.items():
            parts = [[record] for record in records if _is_large(record)]
            if rest := [record for record in records if not _is_large(record)]:
                parts.append(rest)
            for part in parts:
                done = StepDone(worker=self._instance, step=step, records=part)
                self._outbox.put(inbox(detokenizer), done)
        for scheduler, legs in self._ended.items():
            self._outbox.put(inbox(scheduler), Ended(worker=self._instance, legs=legs))
        self._records.clear()
        self._ended.clear()


def _is_large(record: StepRecord) -> bool:
    return count_ids(record.ids) > 1 or record.prompt_logprobs is not None
