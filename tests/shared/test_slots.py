"""Lent memory: what a borrower may touch, and when the owner may use it again."""

import os
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from shared.messages import Lent
from shared.slots import BorrowedSlots, OwnSlots, host


@pytest.fixture
def own() -> Iterator[OwnSlots]:
    slots = OwnSlots(num_slots=3, slot_bytes=100)
    yield slots
    slots.close()


@pytest.fixture
def borrowed(own: OwnSlots) -> Iterator[BorrowedSlots]:
    slots = BorrowedSlots.open(own.lent)
    yield slots
    slots.close()


def test_what_one_writes_the_other_reads(own: OwnSlots, borrowed: BorrowedSlots) -> None:
    """Both ends see one memory, and slots do not overlap."""
    for slot in range(3):
        own.payload(slot)[:] = bytes([slot + 1]) * 100
    for slot in range(3):
        assert bytes(borrowed.payload(slot)) == bytes([slot + 1]) * 100
    borrowed.payload(1)[:] = b"x" * 100
    assert bytes(own.payload(0)) == b"\1" * 100
    assert bytes(own.payload(1)) == b"x" * 100


def test_only_what_is_lent_may_be_used(own: OwnSlots, borrowed: BorrowedSlots) -> None:
    """A message that comes late, twice, or for slots that do not exist is refused."""
    slots = own.take(2)
    assert not borrowed.may_use(slots, 7)
    own.lend(slots, 7)
    assert borrowed.may_use(slots, 7)
    assert not borrowed.may_use(slots, 6)
    assert not borrowed.may_use([*slots, 3], 7)
    assert not borrowed.may_use([-1], 7)
    borrowed.give_back(slots, 7)
    assert not borrowed.may_use(slots, 7)


def test_a_slot_comes_back_when_it_was_returned(own: OwnSlots, borrowed: BorrowedSlots) -> None:
    """The owner sees it in the slot itself: no message is needed."""
    slots = own.take(5)
    assert len(slots) == 3
    assert own.num_free == 0
    assert own.take(1) == []
    own.lend(slots, 1)
    borrowed.give_back(slots[:2], 1)
    assert not own.returned(slots)
    assert own.returned(slots[:2])
    own.release(slots[:2])
    assert own.num_free == 2
    again = own.take(1)
    own.lend(again, 2)
    assert not own.returned(again)
    assert not borrowed.may_use(again, 1)


def test_a_borrower_in_another_process_holds_the_memory_alone() -> None:
    """It opens by number, and its view outlives the owner's."""
    own = OwnSlots(num_slots=1, slot_bytes=8)
    own.payload(0)[:] = b"outlived"
    code = (
        "import sys, msgspec\n"
        "from shared.messages import Lent\n"
        "from shared.slots import BorrowedSlots\n"
        "slots = BorrowedSlots.open(msgspec.json.decode(sys.argv[1], type=Lent))\n"
        "print('open', flush=True)\n"
        "sys.stdin.read()\n"
        "print(bytes(slots.payload(0)).decode())\n"
    )
    argument = msgspec.json.encode(own.lent).decode()
    with subprocess.Popen(
        [sys.executable, "-c", code, argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "open\n"
        own.close()
        out, _ = child.communicate()
    assert out == "outlived\n"


def test_memory_that_is_not_as_said_is_refused(own: OwnSlots) -> None:
    """Another size, memory that can shrink, no owner: nothing is mapped."""
    lent = own.lent
    with pytest.raises(ValueError, match="another size"):
        BorrowedSlots.open(Lent(lent.pid, lent.fd, lent.num_slots + 1, lent.slot_bytes))
    with pytest.raises(ValueError, match="0 slots"):
        BorrowedSlots.open(Lent(lent.pid, lent.fd, 0, lent.slot_bytes))
    with pytest.raises(FileNotFoundError):
        BorrowedSlots.open(Lent(lent.pid, 1 << 20, lent.num_slots, lent.slot_bytes))
    unsealed = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, 3 * 192)
    try:
        with pytest.raises(ValueError, match="shrink"):
            BorrowedSlots.open(Lent(os.getpid(), unsealed, 3, 100))
    finally:
        os.close(unsealed)


def test_processes_of_a_host_agree_on_its_name() -> None:
    """A child says the same as its parent."""
    code = "from shared.slots import host; print(host())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == host()
