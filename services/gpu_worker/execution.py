"""One step of the model, such that what goes wrong in a row hurts that row's leg alone."""

from collections import Counter
from collections.abc import Callable

from services.gpu_worker.runner import ModelRunner, Outcome, Scheduled
from shared.log import log

_BROKEN_STEPS_MAX = 3  # steps in a row in which every row raises: it is the model, not a request

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
        self._broken_steps = 0

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
            self._broken_steps = 0
            return outcomes
        # Not in the `except`: its traceback would hold the tensors for which memory ran out.
        self._counters["steps_isolated"] += 1
        announce("isolate", bound_ms * (1 + len(batch)))
        outcomes = [self._alone(row) for row in batch]
        all_failed = all(outcome.fault for outcome in outcomes)
        self._broken_steps = self._broken_steps + 1 if all_failed else 0
        if self._broken_steps >= _BROKEN_STEPS_MAX:
            raise EngineBroken(f"every row raised in each of {self._broken_steps} steps")
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
