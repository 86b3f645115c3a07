"""Model files to weights: GGUF files and Hugging Face directories of the families we know."""

from pathlib import Path

import torch

from services.gpu_worker.loader import gguf, hugging_face
from services.gpu_worker.models.decoder import DecoderConfig, DecoderWeights

__all__ = ["load_model"]


def load_model(path: Path, dtype: torch.dtype) -> tuple[DecoderConfig, DecoderWeights]:
    """Sizes and weights of the model at `path`, matrices in `dtype`.

    Raises `ModelFileError`, at once for sizes and missing or misshapen tensors, so that nothing
    fails half way through the layers but a file that changes under us.
    """
    load = hugging_face.load if path.is_dir() else gguf.load
    return load(path, dtype)
