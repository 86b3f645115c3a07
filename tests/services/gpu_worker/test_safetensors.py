"""Hugging Face directories: shards, dtypes and ties as they come, and every way to be broken."""

import json
import os

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.gpu_worker.loader import load_model
from services.gpu_worker.loader.mapped import PIECE_BYTES
from services.gpu_worker.loader.safetensors import SafeTensors
from shared.gguf_file import ModelFileError
from tests.services.gpu_worker.legs_kit import Legs
from tests.services.gpu_worker.test_loader import (
    CONFIG,
    HIDDEN,
    flat,
    refused,
    weights,
    write_directory,
)
from tests.services.gpu_worker.tiny_families import reference, reference_logits, runner_of

NORM = "model.norm.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def write_shards(folder, *parts, named=None):
    """Each part a shard; an index that names them, or what `named` says instead."""
    shards = [f"model-{i}.safetensors" for i in range(len(parts))]
    for shard, part in zip(shards, parts, strict=True):
        save_file(part, str(folder / shard))
    index = {name: shard for shard, part in zip(shards, parts, strict=True) for name in part}
    (folder / INDEX).write_text(json.dumps({"weight_map": index | (named or {})}))
    return folder


def test_shards_of_mixed_dtypes_are_read_as_they_are(tmp_path):
    """F32, F16 and BF16 in one model, at odd places: the values of each, in the dtype asked for."""
    kinds = (torch.float32, torch.float16, torch.bfloat16)
    tensors = {name: t.to(kinds[i % 3]) for i, (name, t) in enumerate(weights().items())}
    folder = write_directory(tmp_path / "mixed")
    names = [*tensors]
    write_shards(folder, *({name: tensors[name] for name in names[i::2]} for i in range(2)))
    widened = {name: tensor.float() for name, tensor in tensors.items()}
    whole = write_directory(tmp_path / "whole", tensors=widened)
    for dtype in (torch.float32, torch.bfloat16):
        pairs = zip(flat(load_model(folder, dtype)), flat(load_model(whole, dtype)), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_data_may_lie_at_any_byte(tmp_path):
    """A header of odd length shifts all data; so do BF16 tensors of odd size."""
    folder = write_directory(tmp_path / "hf", tensors=weights())
    expected = flat(load_model(folder, torch.float32))
    rewrite(folder / SINGLE, lambda header: header, padding=3)
    for ours, theirs in zip(flat(load_model(folder, torch.float32)), expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("head", ["absent", "equal", "another"])
def test_a_head_beside_a_tied_embedding_counts_as_transformers_counts_it(tmp_path, head):
    """`tie_word_embeddings` is true, and the file has no head, the embedding again, or another."""
    model = reference("llama, tied, biases")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    embedding = tensors["model.embed_tokens.weight"]
    if head != "absent":
        tensors["lm_head.weight"] = embedding.clone() if head == "equal" else embedding.flip(0)
    save_file(tensors, str(tmp_path / SINGLE), {"format": "pt"})
    runner = runner_of(tmp_path)
    legs = Legs(runner)
    leg = legs.add([5, 6, 7])
    legs.run({leg: 40}, 4)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    logits = reference_logits(model, [5, 6, 7, *leg.output_ids])
    assert leg.output_ids == logits[2:-1].argmax(-1).tolist()


def test_tensors_of_different_sizes_are_not_the_same(tmp_path):
    """Of a dtype that is not known here, one longer than the other by whole pieces."""
    size = PIECE_BYTES
    kind = {"dtype": "F4", "shape": [size]}
    header = {
        "a": kind | {"data_offsets": [0, size]},
        "b": kind | {"data_offsets": [size, 4 * size]},
    }
    text = json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + bytes(4 * size))
    assert not SafeTensors(tmp_path, norm_offset=0.0).same("a", "b")


def test_a_file_replaced_under_a_running_model_changes_nothing(tmp_path):
    """Nothing of the file is mapped once the model is built, whatever its dtype."""
    reference("llama").save_pretrained(tmp_path)
    runner = runner_of(tmp_path)

    def answer():
        legs = Legs(runner)
        leg = legs.add([5, 6, 7])
        legs.run({leg: 40}, 4)
        return leg.output_ids

    before = answer()
    with (tmp_path / SINGLE).open("r+b") as file:
        file.write(bytes(os.fstat(file.fileno()).st_size))
    assert answer() == before


def test_pickled_weights_are_refused_with_what_to_do(tmp_path):
    folder = write_directory(tmp_path / "hf")
    torch.save({}, folder / "pytorch_model.bin")
    refused(folder, SINGLE, "pytorch_model.bin")
    refused(folder, SINGLE, "save_pretrained")


@pytest.mark.parametrize(
    ("named", "what", "reason"),
    [
        ({NORM: "../m.safetensors"}, "weight_map", "outside the directory"),
        ({NORM: ".."}, "weight_map", "outside the directory"),
        ({NORM: ""}, "weight_map", "outside the directory"),
        ({NORM: "a\0b"}, "file", "missing"),
        ({NORM: "none.safetensors"}, "file", "missing"),
        ({NORM: "config.json"}, "header", "bytes announced"),
        ({"model.extra.weight": "model-0.safetensors"}, "model.extra.weight", "the index names"),
        ({NORM: "model-0.safetensors"}, NORM, "the index names"),
        ({NORM: 7}, "content", "weight_map"),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(tmp_path, named, what, reason):
    folder = write_directory(tmp_path / "hf")
    tensors = weights()
    norm = {NORM: tensors.pop(NORM)}
    refused(write_shards(folder, tensors, norm, named=named), what, reason)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    tensors = weights()
    folder = write_shards(write_directory(tmp_path / "hf"), tensors, {NORM: tensors[NORM]})
    refused(folder, NORM, "also in model-0.safetensors")


def rewrite(file, change, padding=0):
    """Let `change` have the header of `file`; the data stays."""
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    text = json.dumps(change(header)).encode() + b" " * padding
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def entry(**changes):
    """A header whose norm is changed."""
    return lambda header: header | {NORM: header[NORM] | changes}


def moved(by):
    def change(header):
        start, stop = header[NORM]["data_offsets"]
        return entry(data_offsets=[start + by, stop + by])(header)

    return change


@pytest.mark.parametrize(
    ("change", "what", "reason"),
    [
        (entry(dtype="I32"), NORM, "I32 is not supported"),
        (entry(dtype="F16"), NORM, "bytes for F16"),
        (entry(dtype="Q4", shape=[HIDDEN]), NORM, "Q4 is not supported"),
        (entry(dtype=7), NORM, "$.dtype"),
        (entry(shape=[HIDDEN + 1]), NORM, "bytes for F32"),
        (entry(shape=[8, 8]), NORM, "shape [8, 8], expected [64]"),
        (entry(shape=[-1]), NORM, "$.shape"),
        (entry(shape=[1 << 60] * 8), NORM, "bytes for F32"),
        (entry(shape=[1] * 100_000), NORM, "$.shape"),
        (entry(data_offsets=[0]), NORM, "$.data_offsets"),
        (entry(data_offsets=[4, 0]), NORM, "before its start"),
        (entry(data_offsets=[0, 1 << 59]), NORM, "truncated"),
        (entry(data_offsets=[0, 1 << 70]), NORM, "$.data_offsets"),
        (moved(-4), NORM, "overlaps"),
        (moved(-1 << 40), NORM, "$.data_offsets"),
        (lambda header: [header], "header", "array"),
        (lambda header: {NORM: header[NORM]}, NORM, "hole"),
        (lambda header: {"__metadata__": header}, "file", "the header says"),
    ],
)
def test_a_header_that_does_not_fit_its_data_is_refused_by_tensor(tmp_path, change, what, reason):
    folder = write_directory(tmp_path / "hf", tensors=weights())
    rewrite(folder / SINGLE, change)
    refused(folder, what, reason)


@pytest.mark.parametrize("size", [0, 1, 1 << 20, 99_999_999, 100_000_001, (1 << 64) - 1])
def test_a_length_of_header_that_cannot_be_is_refused(tmp_path, size):
    folder = write_directory(tmp_path / "hf", tensors=weights())
    content = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(size.to_bytes(8, "little") + content[8:])
    refused(folder, "header", "")


def loads_or_names_its_fault(folder):
    try:
        list(flat(load_model(folder, torch.float32)))
    except ModelFileError as error:
        return error.file and error.what and error.reason
    return True


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_directory(tmp_path_factory.mktemp("sound") / "hf", tensors=weights())


@given(
    st.lists(st.tuples(st.integers(0, 1 << 13), st.integers(0, 255)), min_size=1, max_size=3),
    st.integers(0, 1 << 16) | st.none(),
)
@settings(max_examples=150, deadline=None)
def test_a_damaged_or_cut_file_names_its_fault(sound, changes, length):
    """Never another error, whichever bytes of the header changed or wherever the file ends."""
    file = sound / SINGLE
    content = file.read_bytes()
    header_bytes = 8 + int.from_bytes(content[:8], "little")
    damaged = bytearray(content)
    for place, byte in changes:
        damaged[place % header_bytes] = byte
    file.write_bytes(damaged[:length])
    try:
        assert loads_or_names_its_fault(sound)
    finally:
        file.write_bytes(content)


KEYS = [
    *CONFIG,
    "attention_bias",
    "head_dim",
    "layer_types",
    "max_window_layers",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "use_sliding_window",
]
ROPES = {
    "rope_type": st.sampled_from(["default", "dynamic", "linear", "llama3", "yarn", "longrope"]),
    "short_factor": st.lists(st.just(1.5), min_size=8, max_size=8) | st.just([0.0] * 8),
}
ABSURD = st.sampled_from(
    [0, -1, 1, 2, 1.5, 1e-320, 1e308, 10**10, 1 << 62, 10**400, None, True, "1", [], [1], {}]
)
ROPE_KEYS = [
    "factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "rope_theta",
    "partial_rotary_factor",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
    "full_attention",
    "sliding_attention",
]
ROPE = st.fixed_dictionaries(ROPES, optional=dict.fromkeys(ROPE_KEYS, ABSURD))
MODEL_TYPES = st.sampled_from(["llama", "mistral", "qwen2", "gemma3_text", "phi3"])


@given(
    st.dictionaries(st.sampled_from(KEYS), ABSURD | ROPE, max_size=3),
    st.sets(st.sampled_from(KEYS), max_size=1),
    MODEL_TYPES,
    ROPE,
)
@settings(max_examples=300, deadline=None)
def test_an_absurd_config_names_its_fault(sound, changes, dropped, model_type, rope):
    """Never another error and nothing as large as the config says, whatever its numbers are."""
    file = sound / "config.json"
    content = {"model_type": model_type} | {k: v for k, v in CONFIG.items() if k not in dropped}
    file.write_text(json.dumps(content | {"rope_scaling": rope} | changes))
    try:
        assert loads_or_names_its_fault(sound)
    finally:
        file.write_text(json.dumps(CONFIG))


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"7", b"\xff", b'{"a":' * 100_000])
def test_a_config_that_is_no_object_is_refused(sound, content):
    file = sound / "config.json"
    file.write_bytes(content)
    try:
        refused(sound, "content", "")
    finally:
        file.write_text(json.dumps(CONFIG))
