"""Write the .json files of this folder: `python -m tests.golden.make`. Takes minutes.

The reference shares no code with the engine but the reader of the file's head: `transformers` runs
the weights that the `gguf` package dequantizes, in fp32.
"""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

from services.tokenizer.tokenizer import Tokenizer
from shared.gguf_file import GgufHead, read_gguf
from shared.model_files import default_model, read_model
from tests.golden.prompts import passages, prompts

FILE = Path(__file__).with_name("default_model.json")
PERPLEXITY_FILE = Path(__file__).with_name("perplexity.json")
NEW_IDS = 16
NEAR_TIE = 1e-3  # of logits: below it either id may be the best

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def reference() -> LlamaForCausalLM:
    path = default_model()
    head = read_gguf(path)
    model = LlamaForCausalLM(_config(head)).eval()
    data = np.memmap(path, mode="r")
    state = {}
    for name, info in head.tensors.items():
        raw = data[info.offset : info.offset + info.num_bytes]
        rows = raw.reshape(info.shape[0], -1) if len(info.shape) == 2 else raw
        values = dequantize(rows, GGMLQuantizationType(info.ggml_type)).reshape(info.shape)
        if name.endswith(("attn_q.weight", "attn_k.weight")):  # undo llama.cpp's order of pairs
            values = values.reshape(-1, 32, 2, info.shape[1]).swapaxes(1, 2).reshape(info.shape)
        *block, part, _ = name.split(".")
        layer = f"model.layers.{block[1]}." if block else ""
        state[f"{layer}{_NAMES[part]}.weight"] = torch.from_numpy(np.array(values, np.float32))
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state)
    return model


def _config(head: GgufHead) -> LlamaConfig:
    def of(key: str) -> Any:
        return head.metadata[f"llama.{key}"]

    return LlamaConfig(
        vocab_size=len(head.metadata["tokenizer.ggml.tokens"]),
        hidden_size=of("embedding_length"),
        intermediate_size=of("feed_forward_length"),
        num_hidden_layers=of("block_count"),
        num_attention_heads=of("attention.head_count"),
        num_key_value_heads=of("attention.head_count_kv"),
        max_position_embeddings=of("context_length"),
        rms_norm_eps=of("attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": of("rope.freq_base")},
        tie_word_embeddings=True,
    )


def answer(model: LlamaForCausalLM, prompt_ids: list[int]) -> dict[str, Any]:
    """Greedy ids, end ids not minded; and at near ties the other id, by index."""
    ids: list[int] = []
    ties: dict[str, int] = {}
    given, cache = torch.tensor([prompt_ids]), None
    with torch.inference_mode():
        for index in range(NEW_IDS):
            out = model(given, cache=cache, use_cache=True, logits_to_keep=1)
            best = out.logits[0, -1].topk(2)
            first, second = best.indices.tolist()
            if best.values[0] - best.values[1] < NEAR_TIE:
                ties[str(index)] = second
            ids.append(first)
            given, cache = torch.tensor([[first]]), out.past_key_values
    return {"prompt_ids": prompt_ids, "ids": ids, "near_ties": ties}


def perplexity(model: LlamaForCausalLM, ids: list[int]) -> float:
    """Of every id but the first, each seen after all before it."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids[:-1]]), use_cache=False).logits[0]
    return math.exp(torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[1:])))


def main() -> None:
    tokenizer = Tokenizer(read_model(default_model()))
    model = reference()
    texts = map(tokenizer.encode, passages())
    found = [{"num_ids": len(ids), "perplexity": perplexity(model, ids)} for ids in texts]
    PERPLEXITY_FILE.write_text(json.dumps(found) + "\n")
    lines = [json.dumps(answer(model, ids)) for ids in prompts(tokenizer.encode)]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
