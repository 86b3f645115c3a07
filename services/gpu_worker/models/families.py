"""What makes a family different from Llama; the decoder that runs them all is in `decoder.py`."""

from msgspec import Struct


class Family(Struct, frozen=True, kw_only=True):
    """Llama is the family of which nothing here is true."""

    qkv_bias: bool = False  # queries, keys and values are shifted
    qk_norm: bool = False  # each head's query and key is normalized before it is turned
    post_norms: bool = False  # attention and feed-forward are normalized on their way out, too
    gelu: bool = False  # GeGLU instead of SwiGLU
    scaled_embedding: bool = False  # by sqrt(hidden_size)
    fused: bool = False  # files hold qkv and gate_up as one matrix each
    windowed: bool = False  # a sliding window, where the model names one, bounds attention
    whole_every: int = 0  # of the windowed layers, each such one sees everything; 0 = none does
    local_rope: bool = False  # windowed layers have a rope of their own


_GEMMA = {
    "post_norms": True,
    "gelu": True,
    "scaled_embedding": True,
    "windowed": True,
}

FAMILIES = {
    "llama": Family(),
    "mistral": Family(windowed=True),
    "qwen2": Family(qkv_bias=True, windowed=True),
    "qwen3": Family(qk_norm=True, windowed=True),
    "gemma2": Family(**_GEMMA, whole_every=2),
    "gemma3": Family(**_GEMMA, whole_every=6, qk_norm=True, local_rope=True),
    "phi3": Family(fused=True, windowed=True),
}


def windows_of(family: Family, num_layers: int, window: int) -> tuple[int, ...]:
    """How many tokens back, itself included, a token of each layer sees; 0 = all."""
    if not family.windowed or not window:
        return (0,) * num_layers
    every = family.whole_every
    return tuple(0 if every and (i + 1) % every == 0 else window for i in range(num_layers))
