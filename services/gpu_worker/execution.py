"""One step of the model, such that what goes wrong in a row hurts that row's leg alone."""

from collections import Counter
from collections.abc import Callable

from services.gpu_worker.runner import ModelRunner, Outcome, Scheduled
from shared.log import log

_BROKEN_BY_MAX = 3  # prompts with which every row of a step raised, and no row was well between

Announce = Callable[[str, int], None]
"""Told the name of a phase and its bound in ms."""


class EngineBroken(Exception):
    """The model raises whatever it is given; only a new process can help."""


def silent(phase: str, bound_ms: int) -> None:
    """Announce to nobody."""


class Execution:
    """Runs batches on a model. Counts `steps_isolated` in `counters`."""

    def __init__(self, runner: ModelRunner, counters: Counter[str]) -> None:
        self._runner = runner
        self._counters = counters
        self._broken_by: set[tuple[int, ...]] = set()

    def run(self, batch: list[Scheduled], announce: Announce) -> list[Outcome]:
        """Compute `batch`, saying before each long phase what it is and how long it may last.

        If the model raises, each row is tried alone, and only those that raise again fail; a row
        can be repeated because the model changes no sequence. `EngineBroken` if that never helps.
        """
        bound_ms = self._runner.phase_bound_ms(batch)
        announce("prefill" if any(row.num_tokens > 1 for row in batch) else "decode", bound_ms)
        try:
            outcomes = self._runner.execute(batch)
        except Exception as error:  # noqa: BLE001 whatever a model raises is the fault of some row
            log.error("step_raised", rows=len(batch), exc_info=error)
        else:
            self._broken_by.clear()
            return outcomes
        # Not in the `except`: its traceback would hold the tensors for which memory ran out.
        self._counters["steps_isolated"] += 1
        announce("isolate", bound_ms * (1 + len(batch)))
        outcomes = [self._alone(row) for row in batch]
        if all(outcome.fault for outcome in outcomes):
            # Once per prompt: a request that raises comes again when it is driven again.
            self._broken_by.add(tuple(batch[0].sequence.prompt_ids))
        else:
            self._broken_by.clear()
        if len(self._broken_by) >= _BROKEN_BY_MAX:
            raise EngineBroken(f"every row raised, with {len(self._broken_by)} prompts in a row")
        return outcomes

    def _alone(self, row: Scheduled) -> Outcome:
        try:
            (outcome,) = self._runner.execute([row])
        except MemoryError:
            return Outcome(fault="out_of_memory")
        except Exception as error:  # noqa: BLE001 see `run`
            log.error("row_raised", num_tokens=row.num_tokens, exc_info=error)
            return Outcome(fault="raised")
        return outcome
