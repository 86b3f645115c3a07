"""How much a worker holds while it loads: its packed weights and little more, in every format."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from tests.services.gpu_worker.test_loader import GGUF_NAMES

VOCAB, HIDDEN, INNER, LAYERS, HEADS = 16_384, 1024, 2816, 6, 16
CONFIG = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
LOAD = """
import re, sys
from pathlib import Path
import torch
from services.gpu_worker.loader import load_model
from services.gpu_worker.models.decoder import Decoder

def resident(field):
    return int(re.search(rf"{field}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

torch.set_num_threads(1)
dtype = getattr(torch, sys.argv[2])
torch.ops.mkldnn._reorder_linear_weight(torch.zeros(64, 64, dtype=dtype))  # the library's own needs
before = resident("VmRSS")
model = Decoder(*load_model(Path(sys.argv[1]), dtype), 128)
print(resident("VmHWM") - before, resident("VmRSS") - before)
"""


def shapes():
    """Every tensor of the model under Hugging Face names."""
    found = {"model.embed_tokens": (VOCAB, HIDDEN), "model.norm": (HIDDEN,)}
    found["lm_head"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
        found |= {f"{prefix}mlp.{part}_proj": (INNER, HIDDEN) for part in ("gate", "up")}
        found |= {f"{prefix}mlp.down_proj": (HIDDEN, INNER)}
        norms = ("input_layernorm", "post_attention_layernorm")
        found |= {f"{prefix}{norm}": (HIDDEN,) for norm in norms}
    return {f"{name}.weight": shape for name, shape in found.items()}


def values(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def write_directory(folder, kind):
    """All weights zero: the data is a hole in the file."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    entries, end = {}, 0
    for name, shape in shapes().items():
        start, end = end, end + values(shape) * {"F32": 4, "BF16": 2}[kind]
        entries[name] = {"dtype": kind, "shape": shape, "data_offsets": [start, end]}
    header = json.dumps(entries).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + end)
    return folder


def write_gguf(folder, kind):
    file = folder / "m.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    size = 0
    for name, shape in shapes().items():
        for old, new in GGUF_NAMES.items():
            name = name.replace(old, new)
        raw = GGMLQuantizationType.F32 if len(shape) == 1 else GGMLQuantizationType[kind]
        elements, block = GGML_QUANT_SIZES[raw]
        num_bytes = values(shape) // elements * block
        writer.add_tensor_info(name, shape, None, num_bytes, raw)
        size += -(-num_bytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with file.open("r+b") as opened:
        opened.truncate(opened.seek(0, 2) + 32 + size)
    return file


@pytest.mark.parametrize(
    ("write", "kind", "dtype"),
    [
        (write_directory, "F32", "float32"),
        (write_directory, "BF16", "float32"),
        (write_gguf, "Q4_0", "bfloat16"),
    ],
)
def test_a_loading_worker_holds_its_weights_and_one_matrix(tmp_path, write, kind, dtype):
    """The peak of resident memory, pages of the file included, is within 15 % of the packed weights
    and the largest matrix; what stays is within 15 % of the weights.
    """
    model = write(tmp_path, kind)
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(model), dtype],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak_kb, stays_kb = map(int, done.stdout.split())
    item_bytes = 4 if dtype == "float32" else 2
    packed = sum(map(values, shapes().values())) * item_bytes
    largest = max(map(values, shapes().values())) * item_bytes
    base = 56 << 20  # pieces on their way, the metadata, what the allocator keeps
    assert packed < stays_kb << 10 <= 1.15 * packed + base
    assert peak_kb << 10 <= 1.15 * packed + largest + base
