"""The slots of a worker's engine, and which kv_tier holds which of them. Time is passed in."""

import os
import secrets
import select
from dataclasses import dataclass
from operator import attrgetter

from shared.core import Outbox
from shared.messages import Lent, ReturnSlots
from shared.slots import OwnSlots
from shared.subjects import inbox

_ASK_S = 1.0  # between two questions for the slots of overdue answers


class Borrower:
    """A process that may hold slots. Raises `OSError` where there is none."""

    def __init__(self, instance: str, pid: int) -> None:
        self.instance = instance
        self._fd = os.pidfd_open(pid)
        self._ends = select.poll()
        self._ends.register(self._fd, select.POLLIN)

    @property
    def is_gone(self) -> bool:
        return bool(self._ends.poll(0))

    def __del__(self) -> None:  # with its last loan
        if hasattr(self, "_fd"):
            os.close(self._fd)


@dataclass(slots=True, frozen=True)
class Loan:
    """`slots` are lent to `borrower`."""

    generation: int  # above 0, never used twice
    slots: list[int]
    borrower: Borrower


class Lending:
    """A slot is free, in the engine's hands, or lent. A lent one is used again only when it was
    given back, or its borrower's process has ended: a message decides nothing.
    """

    def __init__(self, num_slots: int, slot_bytes: int, worker: str) -> None:
        self._slots = OwnSlots(num_slots, slot_bytes)
        self._worker = worker
        self._generation = secrets.randbits(48)  # no message to a namesake before is for us
        self._overdue: list[Loan] = []
        self._ask_at = 0.0
        self.payload = self._slots.payload
        self.take = self._slots.take
        self.release = self._slots.release

    @property
    def lent(self) -> Lent:
        return self._slots.lent

    @property
    def num_slots(self) -> int:
        return self._slots.num_slots

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_overdue(self) -> int:
        return sum(len(loan.slots) for loan in self._overdue)

    def lend(self, slots: list[int], borrower: Borrower) -> Loan:
        """Slots in the engine's hands are the borrower's from now on; there may be none."""
        self._generation += 1
        self._slots.lend(slots, self._generation)
        return Loan(self._generation, slots, borrower)

    def settle(self, loan: Loan) -> bool:
        """The borrower has answered: whether the slots are in the engine's hands again. If it has
        not given them back they count as overdue.
        """
        if self._slots.returned(loan.slots):
            return True
        self.abandon(loan)
        return False

    def abandon(self, loan: Loan) -> None:
        """Wait no longer for an answer; `collect` frees the slots some day."""
        self._overdue.append(loan)

    def collect(self, now: float, outbox: Outbox) -> None:
        """Free what was given back, or lent to a process that has ended; ask for the rest."""
        waiting = []
        for loan in self._overdue:
            if self._slots.returned(loan.slots) or loan.borrower.is_gone:
                self.release(loan.slots)
            else:
                waiting.append(loan)
        self._overdue = waiting
        if not waiting or now < self._ask_at:
            return
        self._ask_at = now + _ASK_S
        by_instance = attrgetter("borrower.instance")
        for instance in sorted({by_instance(loan) for loan in waiting}):
            loans = [loan for loan in waiting if by_instance(loan) == instance]
            question = ReturnSlots(
                worker=self._worker,
                lent=self.lent,
                generations=[loan.generation for loan in loans],
                slots=[loan.slots for loan in loans],
            )
            outbox.put(inbox(instance), question)

    def wake_at(self) -> float | None:
        """When `collect` has something to do without a message."""
        return self._ask_at if self._overdue else None

    def close(self) -> None:
        self._slots.close()
