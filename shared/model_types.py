"""What a model's files say about it, as every service but the worker's engine needs it."""

from pathlib import Path

from msgspec import Struct

from shared.sampling import SamplingDefaults
from shared.vocabulary import BpeParts, SpmParts, Vocabulary


class ModelFiles(Struct, frozen=True, kw_only=True):
    path: Path
    name: str
    architecture: str
    max_model_len: int  # tokens, prompt and answer together
    vocabulary: Vocabulary
    bos_id: int | None
    add_bos: bool
    chat_template: str  # "" = none
    special_texts: dict[str, str]  # bos_token, eos_token, ...: what a template may name
    # One of three, what texts are encoded with:
    bpe: BpeParts | None = None  # of a GGUF file
    spm: SpmParts | None = None  # of a GGUF file or a tokenizer.model
    tokenizer_json: Path | None = None  # of a Hugging Face directory
    sampling_defaults: SamplingDefaults = SamplingDefaults()

    @property
    def end_ids(self) -> frozenset[int]:
        return self.vocabulary.end_ids
