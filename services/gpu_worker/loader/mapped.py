"""A model file, memory-mapped and read in pieces, so that no copy of it gathers beside the weights.

Pages that were read are given back after each piece: the file's size never adds to the worker's.
"""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shared.gguf_file import ModelFileError

PIECE_BYTES = 1 << 20  # of a Q4_0 tensor it makes 7 MB of fp32, of which dequantizing holds a few


class MappedFile:
    """Bytes of a regular file. Raises `ModelFileError` if it cannot be mapped.

    The mapping lasts as long as this object and no longer: a file that is replaced under a running
    model must not change its words.
    """

    def __init__(self, file: Path) -> None:
        try:
            if not file.is_file():  # opening a pipe would wait for a writer
                raise ModelFileError(file, "file", "missing, or no regular file")
            with file.open("rb") as opened:
                self._map = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file, a NUL in the name
            raise ModelFileError(file, "file", str(error)) from error
        self.file = file
        self.size = len(self._map)

    def view(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Bytes [start, stop), read-only, not copied."""
        return np.frombuffer(self._map, np.uint8, stop - start, start)

    def rows(
        self, start: int, num_rows: int, row_bytes: int
    ) -> Iterator[tuple[slice, NDArray[np.uint8]]]:
        """Rows of a matrix that begins at byte `start`: which, and their bytes [rows, row_bytes].
        The bytes are valid until the next are asked for.
        """
        step = max(1, PIECE_BYTES // row_bytes) if row_bytes else num_rows
        for first in range(0, num_rows, step or 1):
            last = min(first + step, num_rows)
            begin, end = start + first * row_bytes, start + last * row_bytes
            yield slice(first, last), self.view(begin, end).reshape(last - first, row_bytes)
            self._give_back(begin, end)

    def _give_back(self, begin: int, end: int) -> None:
        begin -= begin % mmap.PAGESIZE
        if end > begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
