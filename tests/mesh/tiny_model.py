"""A Llama of a few kilobytes in Hugging Face's layout, with a template that can refuse."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN, LAYERS, HEADS, KV_HEADS, MLP = 32, 2, 4, 2, 64
TEMPLATE = """{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate') }}{% endif %}
{{ '<s>' + m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}
{% if add_generation_prompt %}<s>assistant: {% endif %}"""


def write_tiny_model(directory: Path) -> Path:
    """Write config, tokenizer and random weights into `directory`."""
    directory.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": len(vocab),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": True,
    }
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE})
    )
    # What a request leaves open is greedy.
    (directory / "generation_config.json").write_text(
        json.dumps({"temperature": 0, "eos_token_id": 1})
    )
    save_file(_weights(len(vocab)), str(directory / "model.safetensors"))
    return directory


def _weights(vocab_size: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random) * 0.2

    kv = HIDDEN // HEADS * KV_HEADS
    weights = {"model.embed_tokens.weight": normal(vocab_size, HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": normal(HIDDEN, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": normal(kv, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": normal(kv, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": normal(HIDDEN, HIDDEN),
            f"{prefix}.mlp.gate_proj.weight": normal(MLP, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": normal(MLP, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": normal(HIDDEN, MLP),
        }
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    return weights
