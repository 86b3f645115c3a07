"""Packed weights on disk: the first worker that loads a model writes them, the others map them.

Packing costs seconds of a core, and memory in every worker; mapping costs neither. Any doubt about
a file is a miss, and a folder that cannot be used costs the time that it would have saved.
"""

import contextlib
import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

from services.gpu_worker.loader.array_file import Arrays, Damaged, map_arrays, write_arrays
from services.gpu_worker.loader.source import ROOT, Source
from shared.log import log

FOLDER = ROOT / ".cache" / "packed"  # nothing of ours lies outside the checkout
WAIT_S = 120.0  # for another that packs the same model; one that takes longer may be stopped
_POLL_S = 0.05
_PACKED, _DRAFT = ".packed", ".draft"


class PackedCache(NamedTuple):
    """A folder of packed weights, at most `bytes_max` of them: those used last stay.

    Of workers that start together one packs and the others wait for it: they would share its cores.
    """

    folder: Path
    bytes_max: int  # 0 = none are kept
    wait_s: float = WAIT_S

    def load(self, source: Source, pack: Callable[[], Arrays]) -> Arrays:
        """The packed weights of `source`: mapped, or what `pack` makes of it."""
        if not self.bytes_max:
            return pack()
        found = draft = None
        try:
            key = source.key()
            if source.unchanged():
                found, draft = self._find(key)
        except OSError as error:
            log.warning("packed_weights_unavailable", error=str(error))
        if found is not None:
            return found
        if draft is None:
            return pack()
        with draft:
            arrays = pack()
            return self._keep(key, arrays, draft) if source.unchanged() else arrays

    def _find(self, key: str) -> "tuple[Arrays | None, _Draft | None]":
        """The file, or the right to write it; neither if another holds that for too long."""
        deadline = time.monotonic() + self.wait_s
        while True:
            if (found := self._mapped(key)) is not None:
                return found, None
            self.folder.mkdir(parents=True, exist_ok=True)
            if (draft := _Draft.begin(self.folder / (key + _DRAFT))) is not None:
                break
            if time.monotonic() >= deadline:
                log.warning("packed_weights_waited", wait_s=self.wait_s)
                return None, None
            time.sleep(_POLL_S)
        if (found := self._mapped(key)) is not None:  # finished between our look and our claim
            draft.close()
            return found, None
        return None, draft

    def _mapped(self, key: str) -> Arrays | None:
        path = self.folder / (key + _PACKED)
        try:
            arrays = map_arrays(path, key)
        except FileNotFoundError:
            return None
        except Damaged as error:
            log.warning("packed_weights_damaged", file=str(path), error=str(error))
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):  # a folder that is only read keeps no order of use
            os.utime(path)
        log.info("packed_weights_mapped", file=str(path))
        return arrays

    def _keep(self, key: str, arrays: Arrays, draft: "_Draft") -> Arrays:
        """Write them, and take the mapped ones; those in memory where that fails."""
        path = self.folder / (key + _PACKED)
        try:
            self._check_room(sum(array.nbytes for array in arrays.values()))
            write_arrays(draft.file, key, arrays)
            draft.publish(path)
            self._evict(path)
            return map_arrays(path, key)
        except (OSError, Damaged) as error:
            log.warning("packed_weights_not_kept", file=str(path), error=str(error))
            return arrays

    def _check_room(self, size: int) -> None:
        """Raise `OSError` for what the cache would not hold, or the disk with nothing to spare."""
        if size > self.bytes_max:
            raise OSError(errno.EFBIG, f"{size} bytes, the cache holds {self.bytes_max}")
        if shutil.disk_usage(self.folder).free < 2 * size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _evict(self, kept: Path) -> None:
        """Remove drafts that nobody writes any more, and what was used longest ago. Who has a file
        mapped keeps it.
        """
        for path in self.folder.glob(f"*{_DRAFT}"):
            if (draft := _Draft.begin(path)) is not None:
                draft.close()
        files = []
        for path in self.folder.glob(f"*{_PACKED}"):
            with contextlib.suppress(FileNotFoundError):  # another evicts
                stat = path.stat()
                files.append((path == kept, stat.st_mtime_ns, stat.st_size, path))
        total = 0
        for is_kept, _, size, path in sorted(files, reverse=True):
            total += size
            if total > self.bytes_max and not is_kept:
                path.unlink(missing_ok=True)


NO_CACHE = PackedCache(FOLDER, 0)


class _Draft:
    """A file that we alone write. When it is closed it is gone, unless it was published.

    The lock is on the file itself and ends with its holder, so what a killed one has left is taken
    over.
    """

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.file = file
        self._path: Path | None = path

    @classmethod
    def begin(cls, path: Path) -> Self | None:
        """None while another writes it."""
        with contextlib.ExitStack() as undo:
            file = undo.enter_context(path.open("ab"))
            with contextlib.suppress(BlockingIOError, FileNotFoundError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if path.stat().st_ino == os.fstat(file.fileno()).st_ino:  # else it was published
                    file.truncate(0)
                    undo.pop_all()
                    return cls(path, file)
        return None

    def publish(self, path: Path) -> None:
        """Give the whole file its name."""
        assert self._path is not None
        self.file.flush()
        os.fsync(self.file.fileno())
        self._path.rename(path)
        self._path = None

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None
        with contextlib.suppress(OSError):  # what found no room on the disk, and is gone with it
            self.file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
