"""A GGUF file's metadata as a decoder, and what its tensors are called. Names as in llama.cpp."""

from pathlib import Path
from typing import Any

from msgspec import structs

from services.gpu_worker.loader.assemble import Names
from services.gpu_worker.models.decoder import DecoderConfig
from services.gpu_worker.models.families import FAMILIES, Family, windows_of
from services.gpu_worker.models.rope import Rope, RopeScaling
from shared.gguf_file import ModelFileError

_GEMMA = ("gemma2", "gemma3")
_BIASABLE = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_MAX_LAYERS, _MAX_HEAD_DIM = 1024, 8192
# A Gemma whose queries are scaled by hidden_size / num_heads instead of head_dim; the file does not
# say it, llama.cpp knows these by their number of layers.
_WIDE_SCALED = {("gemma2", 46), ("gemma3", 62)}


class _Keys:
    """Typed reads of `<architecture>.<key>`; what is missing or wrong is refused by name."""

    def __init__(self, file: Path, metadata: dict[str, Any]) -> None:
        self._file = file
        self._metadata = metadata
        self.architecture = str(metadata.get("general.architecture"))

    def number(self, key: str, kind: type[Any], default: Any = None) -> Any:
        value = self._metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, bool) or not isinstance(value, kind) or value <= 0:
            reason = "missing" if value is None else f"{value!r} is not a positive {kind.__name__}"
            raise self.error(key, reason)
        return value

    def small(self, key: str, limit: int, default: Any = None) -> int:
        """A count that sizes what is built from the metadata alone."""
        value: int = self.number(key, int, default)
        if value > limit:
            raise self.error(key, f"{value} is more than {limit}")
        return value

    def text(self, key: str, default: str) -> str:
        return str(self._metadata.get(f"{self.architecture}.{key}", default))

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self._metadata

    def error(self, key: str, reason: str) -> ModelFileError:
        return ModelFileError(self._file, f"{self.architecture}.{key}", reason)


def family_of(file: Path, metadata: dict[str, Any]) -> Family:
    architecture = metadata.get("general.architecture")
    known = [name for name in FAMILIES if name != "mistral"]  # which calls itself llama
    if architecture not in known:
        reason = f"{architecture!r} is not supported, only {', '.join(known)}"
        raise ModelFileError(file, "general.architecture", reason)
    return FAMILIES[str(architecture)]


def decoder_config(
    file: Path, metadata: dict[str, Any], rope_divisors: tuple[float, ...]
) -> DecoderConfig:
    """Sizes from the metadata; `rope_divisors` are those that the file holds as a tensor."""
    family = family_of(file, metadata)
    keys = _Keys(file, metadata)
    heads, hidden = keys.number("attention.head_count", int), keys.number("embedding_length", int)
    kv_heads = keys.number("attention.head_count_kv", int, heads)
    if heads % kv_heads:
        raise keys.error("attention.head_count_kv", f"{kv_heads} does not divide {heads} heads")
    if keys.has("expert_count") and keys.number("expert_count", int):
        raise keys.error("expert_count", "mixtures of experts are not supported")
    layers = keys.small("block_count", _MAX_LAYERS)
    head_dim = keys.small("attention.key_length", _MAX_HEAD_DIM, hidden // heads)
    rope = _rope(keys, head_dim, rope_divisors)
    gemma = keys.architecture in _GEMMA
    wide = (keys.architecture, layers) in _WIDE_SCALED
    config = DecoderConfig(
        vocab_size=len(metadata.get("tokenizer.ggml.tokens", ())) or keys.number("vocab_size", int),
        hidden_size=hidden,
        inner_size=keys.number("feed_forward_length", int),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=keys.number("attention.layer_norm_rms_epsilon", float),
        context_length=keys.number("context_length", int),
        rope=rope,
        windows=windows_of(family, layers, _window(keys)),
        query_scale=(hidden // heads if wide else head_dim) ** -0.5,
        embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        gelu=family.gelu,
    )
    if family.local_rope:
        base = keys.number("rope.freq_base_swa", float, 10_000.0)
        config = structs.replace(config, local_rope=Rope(base=base, dims=rope.dims))
    return _with_softcaps(keys, config) if gemma else config


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
    if keys.architecture.startswith("qwen"):
        return 0
    key = "attention.sliding_window"
    if keys.architecture not in _GEMMA and not keys.has(key):
        return 0
    window: int = keys.number(key, int, 4096 if keys.architecture == "gemma2" else None)
    return window


def _rope(keys: _Keys, head_dim: int, divisors: tuple[float, ...]) -> Rope:
    dims = keys.number("rope.dimension_count", int, head_dim)
    if dims > head_dim or dims % 2:
        raise keys.error("rope.dimension_count", f"{dims} of {head_dim} dims")
    if dims != head_dim and keys.architecture == "llama":  # rows are reordered by whole heads
        raise keys.error("rope.dimension_count", f"{dims}: only whole heads of {head_dim}")
    base = keys.number("rope.freq_base", float, 10_000.0)
    kind = keys.text("rope.scaling.type", "none")
    if kind not in ("none", "linear"):
        raise keys.error("rope.scaling.type", f"{kind!r} is not supported, only none and linear")
    if divisors and len(divisors) != dims // 2:
        raise keys.error("rope.dimension_count", f"rope_freqs holds {len(divisors)} of {dims // 2}")
    rope = Rope(base=base, dims=dims, divisors=divisors)
    if kind == "none":
        return rope
    if divisors:
        raise keys.error("rope.scaling.type", "linear and rope_freqs together")
    factor = keys.number("rope.scaling.factor", float)
    return rope.scaled(RopeScaling(kind="linear", factor=factor), 1)


def names_of(family: Family, present: set[str]) -> Names:
    """Tensors of `family` in a file that has those `present`; a bias is used where there is one."""
    fused = ("attn_qkv",), ("ffn_up",)
    apart = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")
    qkv, gate_up = fused if family.fused else apart
    biased = {name for name in _BIASABLE if f"blk.0.{name}.bias" in present}
    if family.qkv_bias:
        biased |= {*qkv}
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
