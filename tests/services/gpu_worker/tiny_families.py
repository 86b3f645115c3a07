"""Tiny random checkpoints of every family, made and answered by `transformers`."""

import warnings
from typing import Any

import torch
import transformers

from services.gpu_worker.fused_model import FusedModel
from services.gpu_worker.kv_policy import FULL, KvPolicy
from services.gpu_worker.loader import load_model
from services.gpu_worker.model_runner import DecoderRunner, with_policy
from services.gpu_worker.models.decoder import Decoder, DecoderConfig
from services.gpu_worker.models.fused import FusedDecoder
from services.gpu_worker.models.fused_weights import pack_weights
from services.gpu_worker.runner import ModelSpec
from services.gpu_worker.torch_model import TorchModel
from shared.kv import BLOCK_SIZE

VOCAB, WINDOW = 101, 24
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 400,
}
_GEMMA = {"head_dim": 32, "sliding_window": WINDOW, "query_pre_attn_scalar": 20}
_LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
_DUAL = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

# name -> (family in transformers, what its config changes)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied, biases": (
        "Llama",
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, linear rope": ("Llama", {"rope_parameters": _LINEAR}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("Llama", {"rope_parameters": YARN}),
    "llama, dynamic rope": ("Llama", {"rope_parameters": DYNAMIC}),
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, yarn rope": ("Qwen3", {"head_dim": 32, "rope_parameters": YARN}),
    "gemma2": (
        "Gemma2",
        _GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3Text",
        _GEMMA | {"num_hidden_layers": 7, "rope_parameters": _DUAL, "tie_word_embeddings": True},
    ),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi3, partial rope": (
        "Phi3",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
        | {"partial_rotary_factor": 0.5},
    ),
    "phi3, longrope": (
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 400},
    ),
}


def reference(name: str, **changes: Any) -> Any:
    """A model of `transformers` in fp32, every parameter random, norms around what they are."""
    family, config = CASES[name]
    sizes = SIZES | config | changes
    made = getattr(transformers, f"{family}Config")(**sizes, attn_implementation="eager")
    family = family.removesuffix("Text")
    model = getattr(transformers, f"{family}ForCausalLM")(made).eval()
    random = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.15 if parameter.dim() > 1 else 0.3
            noise = torch.randn(parameter.shape, generator=random) * spread
            parameter.copy_(noise if parameter.dim() > 1 else parameter + noise)
    return model


def reference_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """Of every position, in one piece and without a cache: [ids, vocab]."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits


class Watched(TorchModel):
    """Keeps the logits of every step that sampled."""

    def logits(self, rows, *, values=True):
        logits = super().logits(rows, values=values)
        self.seen = [*getattr(self, "seen", []), *logits.values.clone()]
        return logits


def runner_of(
    path: Any,
    dtype: torch.dtype = torch.float32,
    policy: KvPolicy = FULL,
    kv_dtype: str = "auto",
) -> DecoderRunner:
    """Our runner over the model at `path`, in torch."""
    config, weights = load_model(path, dtype)
    config = with_policy(config, policy, kv_dtype)
    spec = _spec(config, policy)
    decoder = Decoder(config, weights, spec.max_model_len)
    return DecoderRunner(Watched(decoder, spec.num_blocks), spec)


def int8_runner_of(
    path: Any,
    policy: KvPolicy = FULL,
    kv_dtype: str = "auto",
) -> DecoderRunner:
    """Our runner over the model at `path`, as the compiled step."""
    config, weights = load_model(path, torch.float32)
    config = with_policy(config, policy, kv_dtype)
    spec = _spec(config, policy)
    arrays = pack_weights(config, weights)
    decoder = FusedDecoder(config, arrays, spec.max_model_len, spec.num_blocks, num_threads=2)
    return DecoderRunner(FusedModel(decoder), spec)


def _spec(config: DecoderConfig, policy: KvPolicy) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        vocab_size=config.vocab_size,
        max_model_len=1024 if policy.sinks else min(config.context_length, 512),
        num_blocks=80,
        block_size=BLOCK_SIZE,
        end_ids=frozenset(),
        kv_policy=policy,
    )
