"""A Hugging Face directory as a decoder: config.json and the names of its tensors."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta, Struct

from services.gpu_worker.loader.assemble import Names, assemble
from services.gpu_worker.loader.safetensors import SafeTensors
from services.gpu_worker.models.decoder import DecoderConfig, DecoderWeights
from services.gpu_worker.models.families import FAMILIES, Family, windows_of
from services.gpu_worker.models.rope import Rope, RopeError, RopeScaling
from shared.gguf_file import ModelFileError
from shared.model_files import read_json

_Positive = Annotated[int, Meta(gt=0, le=1 << 31)]  # checked against the files' shapes later
_Rate = Annotated[float, Meta(gt=0)]

_GELU = "gelu_pytorch_tanh"
_GEMMA = {
    "hidden_activation": _GELU,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
# What a config.json may leave out because it is the family's default.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 4096, "num_key_value_heads": 8},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _GEMMA | {"rope_theta": 1e6},
}


class _Config(Struct):
    """The part of config.json that decides what is computed."""

    model_type: str
    vocab_size: _Positive
    hidden_size: _Positive
    intermediate_size: _Positive
    num_hidden_layers: Annotated[int, Meta(gt=0, le=1024)]
    num_attention_heads: _Positive
    max_position_embeddings: _Positive
    rms_norm_eps: _Rate
    num_key_value_heads: _Positive | None = None
    head_dim: Annotated[int, Meta(gt=0, le=8192)] | None = None
    rope_theta: _Rate = 10_000.0
    rope_local_base_freq: _Rate = 10_000.0
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None  # newer files: rope_theta and the scaling
    original_max_position_embeddings: _Positive | None = None
    partial_rotary_factor: _Rate = 1.0
    hidden_act: str = "silu"
    hidden_activation: str | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    sliding_window: _Positive | None = None
    use_sliding_window: bool = False  # Qwen's
    max_window_layers: Annotated[int, Meta(ge=0, le=1 << 31)] = 28  # Qwen's
    sliding_window_pattern: _Positive | None = None
    layer_types: list[str] | None = None
    query_pre_attn_scalar: _Rate | None = None
    attn_logit_softcapping: _Rate | None = None
    final_logit_softcapping: _Rate | None = None
    use_bidirectional_attention: bool | None = None


def load(folder: Path, dtype: torch.dtype) -> tuple[DecoderConfig, DecoderWeights]:
    """See `load_model`."""
    file = folder / "config.json"
    content: dict[str, Any] = read_json(file, dict[str, Any])
    known = _DEFAULTS.get(str(content.get("model_type")), {})
    try:
        raw = msgspec.convert(known | content, _Config)
    except msgspec.MsgspecError as error:
        raise ModelFileError(file, "content", str(error)) from error
    family = _family(file, raw)
    config = _decoder_config(file, raw, family)
    tensors = SafeTensors(folder, norm_offset=1.0 if raw.model_type.startswith("gemma") else 0.0)
    names = _names(raw, family)
    tied = raw.tie_word_embeddings and _is_tied(tensors, names)
    return config, assemble(tensors, names, config, tied, dtype)


def _is_tied(tensors: SafeTensors, names: Names) -> bool:
    """A head that is there and is not the embedding counts, whatever the config says: so does
    `transformers`.
    """
    head, embedding = f"{names.lm_head}.weight", f"{names.embedding}.weight"
    return head not in tensors or tensors.same(head, embedding)


def _refuse(file: Path, key: str, value: object, only: str) -> ModelFileError:
    return ModelFileError(file, key, f"{value!r} is not supported, only {only}")


def _family(file: Path, raw: _Config) -> Family:
    families = {("gemma3_text" if name == "gemma3" else name): f for name, f in FAMILIES.items()}
    family = families.get(raw.model_type)
    if family is None:
        raise _refuse(file, "model_type", raw.model_type, ", ".join(families))
    key = "hidden_activation" if family.gelu else "hidden_act"
    wanted = _GELU if family.gelu else "silu"
    if getattr(raw, key) != wanted:
        raise _refuse(file, key, getattr(raw, key), repr(wanted))
    if raw.use_bidirectional_attention:
        raise _refuse(file, "use_bidirectional_attention", True, "false")
    return family


def _decoder_config(file: Path, raw: _Config, family: Family) -> DecoderConfig:
    heads = raw.num_attention_heads
    kv_heads = raw.num_key_value_heads or heads
    if heads % kv_heads:
        raise _refuse(file, "num_key_value_heads", kv_heads, f"a divisor of {heads}")
    head_dim = raw.head_dim or raw.hidden_size // heads
    scaling, local = _scalings(file, raw, family)
    rope = _rope(file, raw, scaling, raw.rope_theta, head_dim)
    local_rope = _rope(file, raw, local, raw.rope_local_base_freq, head_dim) if local else None
    return DecoderConfig(
        vocab_size=raw.vocab_size,
        hidden_size=raw.hidden_size,
        inner_size=raw.intermediate_size,
        num_layers=raw.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_eps=raw.rms_norm_eps,
        context_length=_context_length(raw, scaling),
        rope=rope,
        local_rope=local_rope,
        windows=_windows(file, raw, family),
        query_scale=(raw.query_pre_attn_scalar or head_dim) ** -0.5,
        attention_softcap=raw.attn_logit_softcapping or 0.0,
        logits_softcap=raw.final_logit_softcapping or 0.0,
        embedding_scale=raw.hidden_size**0.5 if family.scaled_embedding else 1.0,
        gelu=family.gelu,
    )


def _context_length(raw: _Config, scaling: RopeScaling) -> int:
    """LongRoPE changes its frequencies past the first training's length, and keys in a cache would
    be of either kind; so such a model serves that length.
    """
    first = scaling.original_max_position_embeddings
    longrope = scaling.kind == "longrope"
    return first if longrope and first else raw.max_position_embeddings


def _scalings(file: Path, raw: _Config, family: Family) -> tuple[RopeScaling, RopeScaling | None]:
    """Of the layers that see everything, and of those with a window if they have another."""
    if not family.local_rope:
        return _scaling(file, raw, raw.rope_parameters or raw.rope_scaling), None
    by_kind = raw.rope_parameters or {}
    whole = by_kind.get("full_attention") or raw.rope_scaling
    return _scaling(file, raw, whole), _scaling(file, raw, by_kind.get("sliding_attention"))


def _scaling(file: Path, raw: _Config, parameters: object) -> RopeScaling:
    try:
        named = dict(msgspec.convert(parameters or {}, dict[str, Any]))
        if "type" in named:
            named.setdefault("rope_type", named["type"])
        named.setdefault("original_max_position_embeddings", raw.original_max_position_embeddings)
        named.setdefault("partial_rotary_factor", raw.partial_rotary_factor)
        return msgspec.convert(named, RopeScaling)
    except msgspec.MsgspecError as error:
        raise ModelFileError(file, "rope_scaling", str(error)) from error


def _rope(file: Path, raw: _Config, scaling: RopeScaling, base: float, head_dim: int) -> Rope:
    try:
        dims = _turned(head_dim, scaling.partial_rotary_factor)
        rope = Rope(base=scaling.rope_theta or base, dims=dims)
        return rope.scaled(scaling, raw.max_position_embeddings)
    except RopeError as error:
        raise ModelFileError(file, f"rope_scaling.{error.key}", error.reason) from error


def _turned(head_dim: int, part: float) -> int:
    dims = int(head_dim * part) if 0 < part <= 1 else 0
    if not dims or dims % 2:
        raise RopeError("partial_rotary_factor", f"{part} turns {dims} of {head_dim} dims")
    return dims


def _windows(file: Path, raw: _Config, family: Family) -> tuple[int, ...]:
    layers, window = raw.num_hidden_layers, raw.sliding_window or 0
    if raw.model_type.startswith("qwen") and not raw.use_sliding_window:
        window = 0
    if raw.layer_types is not None and family.windowed and raw.model_type != "mistral":
        sizes = {"full_attention": 0, "sliding_attention": window}
        if len(raw.layer_types) != layers or not sizes.keys() >= {*raw.layer_types}:
            raise _refuse(file, "layer_types", raw.layer_types, f"{layers} of {', '.join(sizes)}")
        return tuple(sizes[kind] for kind in raw.layer_types)
    if raw.model_type.startswith("qwen"):
        return tuple(window if i >= raw.max_window_layers else 0 for i in range(layers))
    if raw.sliding_window_pattern and family.whole_every:
        family = msgspec.structs.replace(family, whole_every=raw.sliding_window_pattern)
    return windows_of(family, layers, window)


def _names(raw: _Config, family: Family) -> Names:
    qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    gate_up = ("mlp.gate_proj", "mlp.up_proj")
    biased: set[str] = set()
    if family.qkv_bias or raw.attention_bias:
        biased |= {*qkv}
    if raw.attention_bias:
        biased.add("self_attn.o_proj")
    if raw.mlp_bias:
        biased |= {*gate_up, "mlp.down_proj"}
    names = Names(
        embedding="model.embed_tokens",
        norm="model.norm",
        lm_head="lm_head",
        layer="model.layers.{}.",
        attention_norm="input_layernorm",
        qkv=("self_attn.qkv_proj",) if family.fused else qkv,
        attention_out="self_attn.o_proj",
        mlp_norm="post_attention_layernorm",
        gate_up=("mlp.gate_up_proj",) if family.fused else gate_up,
        down="mlp.down_proj",
        biased=frozenset(biased),
    )
    if family.qk_norm:
        names = names._replace(query_norm="self_attn.q_norm", key_norm="self_attn.k_norm")
    if family.post_norms:
        names = names._replace(
            attention_post_norm="post_attention_layernorm",
            mlp_norm="pre_feedforward_layernorm",
            mlp_post_norm="post_feedforward_layernorm",
        )
    return names
