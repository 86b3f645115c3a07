"""GGUF files of every family against `transformers`: names, row orders and metadata as llama.cpp's
converter writes them, and every format that tensors come in.
"""

import math

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gpu_worker.loader import load_model
from services.gpu_worker.loader.gguf import _Tensors
from shared.gguf_file import ModelFileError, read_gguf
from tests.services.gpu_worker.legs_kit import Legs
from tests.services.gpu_worker.tiny_families import (
    LLAMA3,
    VOCAB,
    reference,
    reference_logits,
    runner_of,
)

ARCHITECTURES = {
    "llama": "llama",
    "llama, llama3 rope": "llama",
    "llama, linear rope": "llama",
    "llama, dynamic rope": "llama",
    "llama, yarn rope": "llama",
    "llama, tied, biases": "llama",
    "mistral": "llama",
    "mistral, no window": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3, yarn rope": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "phi3": "phi3",
    "phi3, partial rope": "phi3",
    "phi3, longrope": "phi3",
}
PROMPT = [(5 * i * i + i + 2) % VOCAB for i in range(61)]
NEW_IDS = 5

_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def arrays_of(model, architecture):
    """The model's tensors as the converter names and orders them."""
    gemma = architecture.startswith("gemma")
    after_attention = "post_attention_norm" if gemma else "ffn_norm"
    names = _NAMES | {"post_attention_layernorm": after_attention}
    arrays = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        array = tensor.numpy().copy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            pairs = array.reshape(-1, 2, model.config.head_dim // 2, *array.shape[1:])
            array = pairs.swapaxes(1, 2).reshape(array.shape)
        if gemma and name.endswith("norm.weight"):
            array += 1
        for old, new in names.items():
            name = name.replace(old, new)
        arrays[name] = array
    return arrays


def write(file, model, architecture, arrays):
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = GGUFWriter(file, architecture)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(head_dim)
    ropes = config.rope_parameters
    rope = ropes.get("full_attention", ropes)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    write_rope_scaling(writer, rope, config.max_position_embeddings)
    if architecture == "phi3" or getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_rope_scaling(writer, rope, context_length):
    kind = rope["rope_type"]
    if kind in ("linear", "yarn", "longrope"):
        writer.add_rope_scaling_type(RopeScalingType(kind))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_factor(rope["factor"])
    if kind in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if kind == "longrope":
        trained = rope["original_max_position_embeddings"]
        growth = math.log(context_length / trained) / math.log(trained)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + growth))
        for length in ("short", "long"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_ids_equal_those_of_transformers(tmp_path, name):
    architecture = ARCHITECTURES[name]
    # A GGUF file does not say how queries are scaled: by head_dim, in a model this small.
    changes = {"query_pre_attn_scalar": 32} if architecture.startswith("gemma") else {}
    model = reference(name, **changes)
    arrays = arrays_of(model, architecture)
    if name == "llama, llama3 rope":
        arrays["rope_freqs.weight"] = llama3_divisors()
    runner = runner_of(write(tmp_path / "m.gguf", model, architecture, arrays))
    legs = Legs(runner)
    leg = legs.add(PROMPT)
    legs.run({leg: 40}, NEW_IDS)
    expected = reference_logits(model, PROMPT + leg.output_ids)[len(PROMPT) - 1 : -1]
    found = torch.stack(runner.model.seen[-NEW_IDS:])
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert leg.output_ids == expected.argmax(-1).tolist()


def llama3_divisors():
    """As the converter works them out (Llama 3.1's formula), pair by pair."""
    divisors = []
    for pair in range(8):
        wavelength = 2 * math.pi * LLAMA3["rope_theta"] ** (pair / 8)
        turns = LLAMA3["original_max_position_embeddings"] / wavelength
        low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
        if turns > high:
            divisors.append(1.0)
        elif turns < low:
            divisors.append(LLAMA3["factor"])
        else:
            smooth = (turns - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(divisors, np.float32)


# --- Formats -----------------------------------------------------------------------------------

Q4_K, Q5_K, Q6_K = (GGMLQuantizationType[name] for name in ("Q4_K", "Q5_K", "Q6_K"))
BLOCK_BYTES = {Q4_K: 144, Q5_K: 176, Q6_K: 210}


def scales_of(packed):
    """Eight 6-bit scales and minima of a Q4_K or Q5_K block from their 12 bytes."""
    scales = [packed[i] & 63 for i in range(4)]
    minima = [packed[i + 4] & 63 for i in range(4)]
    scales += [(packed[i + 8] & 15) | (packed[i] >> 6) << 4 for i in range(4)]
    minima += [(packed[i + 8] >> 4) | (packed[i + 4] >> 6) << 4 for i in range(4)]
    return scales, minima


def block_by_hand(kind, raw):
    """256 values of one block, element by element from the format's description."""
    raw = [int(byte) for byte in raw]

    def half(at):
        return float(np.array(raw[at : at + 2], np.uint8).view(np.float16)[0])

    if kind == Q6_K:
        low, high, scales = raw[:128], raw[128:192], np.array(raw[192:208], np.uint8).view(np.int8)
        values = []
        for i in range(256):
            part, place = divmod(i, 128)
            quarter, at = divmod(place, 32)
            byte = low[part * 64 + (quarter % 2) * 32 + at]
            nibble = byte >> 4 if quarter >= 2 else byte & 15
            bits = high[part * 32 + at] >> 2 * quarter & 3
            values.append(half(208) * int(scales[i // 16]) * ((nibble | bits << 4) - 32))
        return values
    scales, minima = scales_of(raw[4:16])
    high, low = (raw[16:48], raw[48:]) if kind == Q5_K else ([0] * 32, raw[16:])
    values = []
    for i in range(256):
        group, at = divmod(i, 32)
        byte = low[group // 2 * 32 + at]
        quant = (byte >> 4 if group % 2 else byte & 15) | (high[at] >> group & 1) << 4
        values.append(half(0) * scales[group] * quant - half(2) * minima[group])
    return values


@pytest.mark.parametrize("kind", [Q4_K, Q5_K, Q6_K], ids=lambda kind: kind.name)
def test_k_quants_are_read_as_their_description_says(tmp_path, kind):
    """Random blocks, decoded by hand. (The package cannot write these formats.)"""
    random = np.random.default_rng(0)
    raw = random.integers(0, 256, (3, 2 * BLOCK_BYTES[kind]), np.uint8)
    halves = [208] if kind == Q6_K else [0, 2]
    for start in range(0, raw.shape[1], BLOCK_BYTES[kind]):
        for at in halves:  # no NaN, no infinity
            value = random.normal(size=3).astype(np.float16)
            raw[:, start + at : start + at + 2] = value[:, None].view(np.uint8)
    file = tmp_path / "m.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_tensor("w", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    head = read_gguf(file)
    tensors = _Tensors(file, head)
    tensors.check("w", (3, 512))
    blocks = raw.reshape(-1, BLOCK_BYTES[kind])
    expected = torch.tensor([block_by_hand(kind, block) for block in blocks]).reshape(3, 512)
    found = torch.empty(3, 512)
    tensors.read("w", found)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-5)
    assert np.array_equal(found.numpy(), dequantize(raw, kind))


def test_rows_that_are_no_whole_blocks_are_refused(tmp_path):
    """Some writer may have left a short last block; the name of the tensor says where."""
    model = reference("qwen2")
    arrays = arrays_of(model, "qwen2")
    file = write(tmp_path / "m.gguf", model, "qwen2", arrays)
    head = read_gguf(file)
    info = head.tensors["blk.0.ffn_up.weight"]
    head.tensors["blk.0.ffn_up.weight"] = info._replace(ggml_type=Q4_K.value)
    with pytest.raises(ModelFileError, match=r"blk\.0\.ffn_up\.weight: rows of 64 .* Q4_K"):
        _Tensors(file, head).check("blk.0.ffn_up.weight", info.shape)


def test_a_scaling_that_is_not_known_is_refused_by_key(tmp_path):
    model = reference("qwen2")
    model.config.rope_parameters["rope_type"] = "linear"
    model.config.rope_parameters["factor"] = -1.0
    file = write(tmp_path / "m.gguf", model, "qwen2", arrays_of(model, "qwen2"))
    with pytest.raises(ModelFileError, match=r"qwen2\.rope\.scaling\.factor: -1"):
        load_model(file, torch.float32)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A sound file's bytes, and how many of them stand before the weights."""
    model = reference("qwen3", num_hidden_layers=1)
    arrays = arrays_of(model, "qwen3")
    file = write(tmp_path_factory.mktemp("gguf") / "m.gguf", model, "qwen3", arrays)
    return file, file.read_bytes(), min(info.offset for info in read_gguf(file).tensors.values())


@given(st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_a_damaged_head_is_refused_by_name_or_read(sound, changes):
    """Never another error, never a hang, whichever bytes before the weights have changed."""
    file, content, head_bytes = sound
    damaged = bytearray(content)
    for place, byte in changes:
        damaged[place % head_bytes] = byte
    file.write_bytes(damaged)
    try:
        _, weights = load_model(file, torch.float32)
        list(weights.layers)
    except ModelFileError as error:
        named = error.what and error.reason
    else:
        named = True
    assert named
