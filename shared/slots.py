"""Memory that one process lends to another of the same host, slot by slot, without a name.

The owner makes it (memfd); the borrower opens it as /proc/PID/fd/FD, so it is gone with the last
process that holds it, however they end. A slot is a header and a payload. The owner writes the
*generation* for which it lends the slot, the borrower the generation that it has *returned*. So a
lost or late message can hurt nobody: the owner uses a slot again only when it was returned or the
borrower's process is gone, and the borrower touches only what is lent for the message it has.
"""

import fcntl
import mmap
import os
import struct
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from shared.messages import Lent

_HEADER = 64  # a cache line, so that payloads are aligned as kernels like it
_WORD = struct.Struct("Q")  # written in one piece
_RETURNED_AT = _WORD.size
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a borrower never runs off the end


def host() -> str:
    """Where processes can open each other's descriptors: this boot, this space of process ids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"


class _Memory:
    """The slots as both ends see them."""

    def __init__(self, fd: int, num_slots: int, slot_bytes: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self._stride = _stride(slot_bytes)
        self._memory = mmap.mmap(fd, num_slots * self._stride)
        self._view = memoryview(self._memory)

    def payload(self, slot: int) -> memoryview:
        """The `slot_bytes` bytes of a slot, to be read and written; release it before `close`."""
        at = slot * self._stride + _HEADER
        return self._view[at : at + self.slot_bytes]

    def close(self) -> None:
        self._view.release()
        self._memory.close()

    def _generation(self, slot: int) -> int:
        (generation,) = _WORD.unpack_from(self._view, slot * self._stride)
        return int(generation)

    def _returned(self, slot: int) -> int:
        (generation,) = _WORD.unpack_from(self._view, slot * self._stride + _RETURNED_AT)
        return int(generation)


class OwnSlots(_Memory):
    """The owner's end. A slot is free, in the owner's hands (`take`), or lent (`lend`)."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        self._fd = os.memfd_create("shoal-kv-slots", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, num_slots * _stride(slot_bytes))
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        super().__init__(self._fd, num_slots, slot_bytes)
        self._free = deque(range(num_slots))

    @property
    def lent(self) -> Lent:
        """What a borrower must know."""
        return Lent(os.getpid(), self._fd, self.num_slots, self.slot_bytes)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Up to `count` free slots; they are the caller's until `release`."""
        return [self._free.popleft() for _ in range(min(count, len(self._free)))]

    def lend(self, slots: Iterable[int], generation: int) -> None:
        """Allow a borrower to use them. `generation` is above 0 and never used twice."""
        for slot in slots:
            _WORD.pack_into(self._view, slot * self._stride, generation)

    def returned(self, slots: Iterable[int]) -> bool:
        """Whether the borrower has given back all of these."""
        return all(self._returned(slot) == self._generation(slot) for slot in slots)

    def release(self, slots: Iterable[int]) -> None:
        """Free slots that were returned, never lent, or lent to a process that is gone."""
        self._free.extend(slots)

    def close(self) -> None:
        super().close()
        os.close(self._fd)


class BorrowedSlots(_Memory):
    """The borrower's end."""

    @classmethod
    def open(cls, lent: Lent) -> Self:
        """Raises `OSError` where the owner is gone or out of reach, `ValueError` where its memory
        is not what `lent` says.
        """
        fd = os.open(f"/proc/{lent.pid}/fd/{lent.fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if lent.num_slots < 1 or lent.slot_bytes < 1:
                raise ValueError(f"{lent.num_slots} slots of {lent.slot_bytes} bytes")
            if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
                raise ValueError("the lent memory can still shrink")
            if os.fstat(fd).st_size != lent.num_slots * _stride(lent.slot_bytes):
                raise ValueError("the lent memory has another size")
            return cls(fd, lent.num_slots, lent.slot_bytes)
        finally:
            os.close(fd)

    def may_use(self, slots: Iterable[int], generation: int) -> bool:
        """Whether all of these are lent for `generation` and were not given back."""
        return all(
            0 <= slot < self.num_slots
            and self._generation(slot) == generation != self._returned(slot)
            for slot in slots
        )

    def give_back(self, slots: Iterable[int], generation: int) -> None:
        """Say that this process touches them no more for `generation`."""
        for slot in slots:
            _WORD.pack_into(self._view, slot * self._stride + _RETURNED_AT, generation)


def _stride(slot_bytes: int) -> int:
    return _HEADER + -(-slot_bytes // _HEADER) * _HEADER
