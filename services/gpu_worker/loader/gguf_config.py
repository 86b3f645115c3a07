"""A GGUF file's metadata as a decoder, and what its tensors are called. Names as in llama.cpp."""

import math
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from services.gpu_worker.loader.assemble import Names
from services.gpu_worker.models.decoder import DecoderConfig
from services.gpu_worker.models.families import FAMILIES, Family, windows_of
from services.gpu_worker.models.rope import Rope, RopeError, RopeScaling
from shared.gguf_file import ModelFileError

_GEMMA = ("gemma2", "gemma3")
_MAX_LAYERS, MAX_HEAD_DIM = 1024, 8192
_MAX_COUNT = 1 << 31  # of rows, columns, tokens; what a file announces is checked against it later
# A Gemma whose queries are scaled by hidden_size / num_heads instead of head_dim; the file does not
# say it, llama.cpp knows these by their number of layers.
_WIDE_SCALED = {("gemma2", 46), ("gemma3", 62)}


class RopeFactors(NamedTuple):
    """Divisors of the rotary frequencies that a file holds as tensors of these names."""

    rope_freqs: tuple[float, ...] = ()  # Llama 3.1's scaling, worked out
    rope_factors_short: tuple[float, ...] = ()  # LongRoPE's, within the first training's length
    rope_factors_long: tuple[float, ...] = ()  # and past it


class _Keys:
    """Typed reads of `<architecture>.<key>`; what is missing or wrong is refused by name."""

    def __init__(self, file: Path, metadata: dict[str, Any]) -> None:
        self._file = file
        self.metadata = metadata
        self.architecture = str(metadata.get("general.architecture"))

    def number(self, key: str, kind: type[Any], default: Any = None) -> Any:
        value = self.get(key, default)
        if value is None:
            raise self.error(key, "missing")
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < math.inf:
            raise self.error(key, f"{value!r} is not a positive {kind.__name__}")
        return value

    def count(self, key: str, default: int | None = None, limit: int = _MAX_COUNT) -> int:
        """`limit` bounds what is built from the metadata alone."""
        value: int = self.number(key, int, default)
        if value > limit:
            raise self.error(key, f"{value} is more than {limit}")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.metadata

    def error(self, key: str, reason: str) -> ModelFileError:
        return ModelFileError(self._file, f"{self.architecture}.{key}", reason)


def family_of(file: Path, metadata: dict[str, Any]) -> Family:
    # A Mistral calls itself llama; what it has more is a window, if the file names one.
    known = {name: f for name, f in FAMILIES.items() if name != "mistral"}
    known["llama"] = FAMILIES["mistral"]
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in known:
        reason = f"{architecture!r} is not supported, only {', '.join(known)}"
        raise ModelFileError(file, "general.architecture", reason)
    return known[architecture]


def decoder_config(file: Path, metadata: dict[str, Any], factors: RopeFactors) -> DecoderConfig:
    """Sizes from the metadata; `factors` are those that the file holds beside it."""
    family = family_of(file, metadata)
    keys = _Keys(file, metadata)
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    kv_heads = keys.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise keys.error("attention.head_count_kv", f"{kv_heads} does not divide {heads} heads")
    if keys.get("expert_count", 0) != 0:
        raise keys.error("expert_count", "mixtures of experts are not supported")
    layers = keys.count("block_count", limit=_MAX_LAYERS)
    head_dim = keys.count("attention.key_length", hidden // heads, MAX_HEAD_DIM)
    rope = _rope(keys, head_dim, factors)
    wide = (keys.architecture, layers) in _WIDE_SCALED
    config = DecoderConfig(
        vocab_size=_vocab_size(keys),
        hidden_size=hidden,
        inner_size=keys.count("feed_forward_length"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", float),
        context_length=_context_length(keys, factors),
        rope=rope,
        windows=windows_of(family, layers, _window(keys)),
        query_scale=(hidden // heads if wide else head_dim) ** -0.5,
        embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        gelu=family.gelu,
    )
    if family.local_rope:
        base = keys.number("rope.freq_base_swa", float, 10_000.0)
        config = structs.replace(config, local_rope=Rope(base=base, dims=rope.dims))
    return _with_softcaps(keys, config) if keys.architecture in _GEMMA else config


def _vocab_size(keys: _Keys) -> int:
    tokens = keys.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else keys.count("vocab_size")


def _context_length(keys: _Keys, factors: RopeFactors) -> int:
    """LongRoPE's is the first training's, as in a Hugging Face directory."""
    trained = keys.count("context_length")
    if factors.rope_factors_short:
        return keys.count("rope.scaling.original_context_length", trained)
    return trained


def _with_softcaps(keys: _Keys, config: DecoderConfig) -> DecoderConfig:
    second = keys.architecture == "gemma2"
    caps = {}
    for field, key, default in (
        ("attention_softcap", "attn_logit_softcapping", 50.0),
        ("logits_softcap", "final_logit_softcapping", 30.0),
    ):
        if second or keys.has(key):
            caps[field] = keys.number(key, float, default)
    return structs.replace(config, **caps)


def _window(keys: _Keys) -> int:
    """Of the windowed layers; 0 = the file names none. A Qwen's layers are never all windowed, and
    llama.cpp does not window them at all.
    """
    key = "attention.sliding_window"
    if keys.architecture.startswith("qwen") or keys.get(key) == 0:
        return 0
    if keys.architecture not in _GEMMA and not keys.has(key):
        return 0
    return keys.count(key, 4096 if keys.architecture == "gemma2" else None)


def _rope(keys: _Keys, head_dim: int, factors: RopeFactors) -> Rope:
    dims = keys.count("rope.dimension_count", head_dim)
    if dims > head_dim or dims % 2:
        raise keys.error("rope.dimension_count", f"{dims} of {head_dim} dims")
    if dims != head_dim and keys.architecture == "llama":  # rows are reordered by whole heads
        raise keys.error("rope.dimension_count", f"{dims}: only whole heads of {head_dim}")
    kind = keys.get("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn", "longrope"):
        only = "none, linear, yarn, longrope"
        raise keys.error("rope.scaling.type", f"{kind!r} is not supported, only {only}")
    tensors = {name: values for name, values in factors._asdict().items() if values}
    for name, values in tensors.items():
        if len(values) != dims // 2:
            raise keys.error("rope.dimension_count", f"{name} holds {len(values)} of {dims // 2}")
    if kind == "longrope" and not factors.rope_factors_short:
        raise keys.error("rope.scaling.type", "longrope without rope_factors_short")
    if len(tensors.keys() - {"rope_factors_long"}) + (kind in ("linear", "yarn")) > 1:
        raise keys.error("rope.scaling.type", f"{kind!r} together with {', '.join(tensors)}")
    scaling = _scaling(keys, kind, factors.rope_factors_short or factors.rope_freqs)
    try:
        rope = Rope(base=keys.number("rope.freq_base", float, 10_000.0), dims=dims)
        rope = rope.scaled(scaling, keys.count("context_length"))
    except RopeError as error:
        raise keys.error("rope.scaling", str(error)) from error
    factor = keys.number("rope.scaling.attn_factor", float, 1.0)
    return structs.replace(rope, magnitude=rope.magnitude * factor)


def _scaling(keys: _Keys, kind: str, divisors: tuple[float, ...]) -> RopeScaling:
    """As a config.json says it. LongRoPE's magnitude is the file's `attn_factor`; YaRN's comes from
    its factor, unless the file holds the whole of it.
    """
    if divisors:
        return RopeScaling(kind="longrope", short_factor=list(divisors), attention_factor=1.0)
    if kind == "none":
        return RopeScaling()
    factor = keys.number("rope.scaling.factor", float)
    if kind == "linear":
        return RopeScaling(kind=kind, factor=factor)
    if keys.get("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise keys.error("rope.scaling.yarn_ext_factor", "only 1 is supported")
    whole, divided = "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier"
    return RopeScaling(
        kind=kind,
        factor=factor,
        original_max_position_embeddings=keys.count(
            "rope.scaling.original_context_length", keys.count("context_length")
        ),
        attention_factor=keys.number(whole, float) if keys.has(whole) else None,
        beta_fast=keys.number("rope.scaling.yarn_beta_fast", float, 32.0),
        beta_slow=keys.number("rope.scaling.yarn_beta_slow", float, 1.0),
        mscale=1.0,
        mscale_all_dim=keys.number(divided, float) if keys.get(divided, 0.0) != 0.0 else None,
    )


def names_of(family: Family, present: set[str]) -> Names:
    """Tensors of `family` in a file that has those `present`; a bias is used where there is one."""
    fused = ("attn_qkv",), ("ffn_up",)
    apart = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")
    qkv, gate_up = fused if family.fused else apart
    biased = {
        part
        for matrix in (qkv, ("attn_output",), gate_up, ("ffn_down",))
        if any(f"blk.0.{part}.bias" in present for part in matrix)
        or (family.qkv_bias and matrix == qkv)
        for part in matrix
    }
    return Names(
        embedding="token_embd",
        norm="output_norm",
        lm_head="output",
        layer="blk.{}.",
        attention_norm="attn_norm",
        qkv=qkv,
        attention_out="attn_output",
        mlp_norm="ffn_norm",
        gate_up=gate_up,
        down="ffn_down",
        query_norm="attn_q_norm" if family.qk_norm else "",
        key_norm="attn_k_norm" if family.qk_norm else "",
        attention_post_norm="post_attention_norm" if family.post_norms else "",
        mlp_post_norm="post_ffw_norm" if family.post_norms else "",
        biased=frozenset(biased),
    )
