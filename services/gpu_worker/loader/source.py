"""What a model's packed weights depend on."""

import functools
import hashlib
import importlib.metadata
from pathlib import Path
from typing import NamedTuple, Self

from services.gpu_worker.loader.safetensors import INDEX

ROOT = Path(__file__).parents[3]
CODE = (  # that reads weights and packs them
    "kernels/cpu/*.py",
    "services/gpu_worker/loader/*.py",
    "services/gpu_worker/models/*.py",
    "shared/gguf_file.py",
)
LIBRARIES = ("gguf", "numpy", "torch")  # that it computes with


class Source(NamedTuple):
    """A model's files, and what they were when they were looked at. Take it before they are read:
    a name says nothing about what was read under it.
    """

    files: tuple[Path, ...]
    seen: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, model: Path) -> Self:
        files = [model]
        if model.is_dir():
            files = [model / "config.json", model / INDEX, *sorted(model.glob("*.safetensors"))]
        present = tuple(file for file in files if file.is_file())
        return cls(present, tuple(map(_seen, present)))

    def unchanged(self) -> bool:
        try:
            return self.seen == tuple(map(_seen, self.files))
        except FileNotFoundError:
            return False

    def key(self) -> str:
        """By content, since the files of two disk images can differ in nothing else. SHA-256, since
        processors that compute int8 have instructions for it: 0.8 ms per MB. Raises `OSError`.
        """
        parts = [f"{library} {importlib.metadata.version(library)}" for library in LIBRARIES]
        code = [file for pattern in CODE for file in sorted(ROOT.glob(pattern))]
        parts += [*map(_digest, code), *_digests(self)]
        if len(self.files) > 1:  # those of a directory name each other
            parts += [file.name for file in self.files]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


@functools.lru_cache(maxsize=1)
def _digests(source: Source) -> list[str]:
    """Of its files; who asks again has seen them the same."""
    return [*map(_digest, source.files)]


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _seen(file: Path) -> tuple[int, ...]:
    stat = file.stat()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
