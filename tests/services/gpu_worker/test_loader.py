import json

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from services.gpu_worker.loader import load_model
from shared.gguf_file import ModelFileError, read_gguf

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 64, 96, 2, 4, 2, 50
HEAD_DIM = HIDDEN // HEADS
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 2.0**-16,
    "rope_theta": 5000.0,
    "tie_word_embeddings": False,
}
TINY_BETA = {"rope_type": "yarn", "factor": 2, "beta_slow": 1e-320}


def weights():
    """Random weights under Hugging Face names."""
    random = torch.Generator().manual_seed(0)
    kv = KV_HEADS * HEAD_DIM
    shapes = {
        "model.embed_tokens": (VOCAB, HIDDEN),
        "model.norm": (HIDDEN,),
        "lm_head": (VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HIDDEN, HIDDEN),
                "self_attn.k_proj": (kv, HIDDEN),
                "self_attn.v_proj": (kv, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HIDDEN),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (INNER, HIDDEN),
                "mlp.up_proj": (INNER, HIDDEN),
                "mlp.down_proj": (HIDDEN, INNER),
            }.items()
        }
    return {f"{n}.weight": torch.randn(s, generator=random) for n, s in shapes.items()}


def write_directory(folder, config=CONFIG, tensors=None):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        save_file(tensors, str(folder / "model.safetensors"))
    return folder


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def to_gguf(tensors):
    """Names and row order of GGUF: q and k in interleaved rotary pairs, as llama.cpp converts."""
    converted = {}
    for name, tensor in tensors.items():
        array = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = array.reshape(-1, 2, HEAD_DIM // 2, HIDDEN)
            array = heads.swapaxes(1, 2).reshape(array.shape)
        for old, new in GGUF_NAMES.items():
            name = name.replace(old, new)
        converted[name] = array
    return converted


def write_gguf(file, arrays, kind=GGMLQuantizationType.F32, architecture="llama", **changes):
    writer = GGUFWriter(file, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(changes.get("kv_heads", KV_HEADS))
    writer.add_layer_norm_rms_eps(2.0**-16)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(changes.get("rope", HEAD_DIM))
    writer.add_vocab_size(VOCAB)
    if "experts" in changes:
        writer.add_expert_count(changes["experts"])
    for name, array in arrays.items():
        plain = array.ndim == 1
        data = array if plain else quantize(array, kind)
        writer.add_tensor(name, data, raw_dtype=None if plain else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def flat(loaded):
    """Every tensor of the loaded weights."""
    _, found = loaded
    layers = []
    for layer in found.layers:
        for part in layer:
            layers += part() if callable(part) else [part]
    layers = [tensor for tensor in layers if tensor is not None]
    return [found.embedding(), found.norm, found.lm_head(), *layers]


def test_both_formats_give_the_same_weights(tmp_path):
    """One model, written as a directory and as GGUF: rotary rows are brought into one order."""
    tensors = weights()
    folder = load_model(write_directory(tmp_path / "hf", tensors=tensors), torch.float32)
    file = load_model(write_gguf(tmp_path / "m.gguf", to_gguf(tensors)), torch.float32)
    assert file[0] == folder[0]
    for ours, theirs in zip(flat(file), flat(folder), strict=True):
        assert torch.equal(ours, theirs)


def test_a_layer_is_fused_in_the_order_that_the_model_splits(tmp_path):
    tensors = weights()
    _, found = load_model(write_directory(tmp_path / "hf", tensors=tensors), torch.float32)
    layer = next(iter(found.layers))
    prefix = "model.layers.0."
    parts = [tensors[f"{prefix}self_attn.{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(layer.qkv().weight, torch.cat(parts))
    parts = [tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.gate_up().weight, torch.cat(parts))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_tensors_are_read_as_they_were_written(tmp_path, name):
    kind = GGMLQuantizationType[name]
    arrays = to_gguf(weights())
    _, found = load_model(write_gguf(tmp_path / "m.gguf", arrays, kind), torch.float32)
    expected = dequantize(quantize(arrays["token_embd.weight"], kind), kind)
    assert np.array_equal(found.embedding().numpy(), expected)


def test_shards_are_found_through_the_index(tmp_path):
    tensors = weights()
    whole = load_model(write_directory(tmp_path / "whole", tensors=tensors), torch.float32)
    folder = write_directory(tmp_path / "shards")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, part in parts.items():
        save_file({name: tensors[name] for name in part}, str(folder / shard))
    index = {"weight_map": {name: shard for shard, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for ours, theirs in zip(flat(load_model(folder, torch.float32)), flat(whole), strict=True):
        assert torch.equal(ours, theirs)


def test_a_tied_head_is_the_embedding(tmp_path):
    tensors = weights()
    del tensors["lm_head.weight"]
    config = CONFIG | {"tie_word_embeddings": True}
    _, found = load_model(write_directory(tmp_path / "hf", config, tensors), torch.float32)
    assert found.lm_head() is found.embedding()
    _, found = load_model(write_gguf(tmp_path / "m.gguf", to_gguf(tensors)), torch.float32)
    assert found.lm_head() is found.embedding()


def test_matrices_come_in_the_dtype_asked_for_and_norms_in_fp32(tmp_path):
    tensors = {name: tensor.half() for name, tensor in weights().items()}
    _, found = load_model(write_directory(tmp_path / "hf", tensors=tensors), torch.bfloat16)
    layer = next(iter(found.layers))
    assert (
        found.embedding().dtype
        == layer.qkv().weight.dtype
        == layer.down().weight.dtype
        == torch.bfloat16
    )
    assert found.norm.dtype == layer.mlp_norm.dtype == torch.float32


def refused(path, what, reason):
    with pytest.raises(ModelFileError) as caught:
        load_model(path, torch.float32)
    assert caught.value.what == what
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("change", "what", "reason"),
    [
        ({"model_type": "mamba"}, "model_type", "'mamba'"),
        ({"hidden_act": "gelu"}, "hidden_act", "'gelu'"),
        ({"attention_bias": True}, "model.layers.0.self_attn.o_proj.bias", "missing"),
        ({"mlp_bias": True}, "model.layers.0.mlp.down_proj.bias", "missing"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling.low_freq_factor", "missing"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "rope_scaling.rope_type", "'mrope'"),
        ({"rope_scaling": TINY_BETA}, "rope_scaling.rope_type", "'yarn'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "3"),
        ({"hidden_size": "big"}, "content", "$.hidden_size"),
        ({"num_hidden_layers": 0}, "content", "$.num_hidden_layers"),
        ({"num_hidden_layers": 3}, "model.layers.2.input_layernorm.weight", "missing"),
        ({"vocab_size": 51}, "model.embed_tokens.weight", "expected [51, 64]"),
    ],
    ids=str,
)
def test_a_foreign_config_is_refused_by_key(tmp_path, change, what, reason):
    folder = write_directory(tmp_path / "hf", CONFIG | change, weights())
    refused(folder, what, reason)


def test_broken_safetensors_are_refused_by_name(tmp_path):
    folder = write_directory(tmp_path / "hf")
    refused(folder, "model.safetensors", "missing")
    save_file(weights(), str(folder / "model.safetensors"))
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused(folder, "model.norm.weight", "truncated")
    tensors = weights() | {"model.norm.weight": torch.zeros(HIDDEN, dtype=torch.int32)}
    save_file(tensors, str(file))
    refused(folder, "model.norm.weight", "I32")


def test_a_truncated_gguf_is_refused_by_the_tensor_that_is_cut(tmp_path):
    file = write_gguf(tmp_path / "m.gguf", to_gguf(weights()))
    last = max(read_gguf(file).tensors.items(), key=lambda item: item[1].offset)[0]
    file.write_bytes(file.read_bytes()[:-200])
    refused(file, last, "truncated")


def test_foreign_ggufs_are_refused_by_key_or_tensor(tmp_path):
    arrays = to_gguf(weights())
    file = tmp_path / "m.gguf"
    refused(write_gguf(file, arrays, architecture="mamba"), "general.architecture", "'mamba'")
    refused(write_gguf(file, arrays, kv_heads=3), "llama.attention.head_count_kv", "3")
    refused(write_gguf(file, arrays, rope=8), "llama.rope.dimension_count", "8")
    refused(write_gguf(file, arrays, experts=8), "llama.expert_count", "experts")
    refused(
        write_gguf(file, arrays, GGMLQuantizationType.MXFP4), "token_embd.weight", "not supported"
    )
    refused(
        write_gguf(file, arrays | {"blk.1.ffn_up.weight": np.zeros((32, 64), np.float32)}),
        "blk.1.ffn_up.weight",
        "expected [96, 64]",
    )
    del arrays["blk.0.attn_v.weight"]
    refused(write_gguf(file, arrays), "blk.0.attn_v.weight", "missing")
