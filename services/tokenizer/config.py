"""The `[tokenizer]` table of the cluster file."""

from msgspec import Struct

from shared.config import AboveZero, Count


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tokenizer process. It handles one request at a time."""

    template_cpu_s: AboveZero = 0.5  # a chat template takes milliseconds; beats stop meanwhile
    max_prompts: Count = 256  # prompts of one request
