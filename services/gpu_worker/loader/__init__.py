"""Model files to weights: GGUF files and Hugging Face directories of the Llama architecture."""

from pathlib import Path

import torch

from services.gpu_worker.loader import gguf, hugging_face
from services.gpu_worker.models.llama import LlamaConfig, LlamaWeights

__all__ = ["load_llama"]


def load_llama(path: Path, dtype: torch.dtype) -> tuple[LlamaConfig, LlamaWeights]:
    """Sizes and weights of the model at `path`, matrices in `dtype`.

    Raises `ModelFileError`, at once for sizes and missing or misshapen tensors, so that nothing
    fails half way through the layers but a file that changes under us.
    """
    load = hugging_face.load if path.is_dir() else gguf.load
    return load(path, dtype)
