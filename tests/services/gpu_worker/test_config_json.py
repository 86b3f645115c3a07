"""What is read from a config.json, as the different versions of the library wrote it."""

import json

import msgspec
import pytest
import torch

from services.gpu_worker.loader import load_model
from shared.gguf_file import ModelFileError
from tests.services.gpu_worker.tiny_families import WINDOW, reference


def config_of(folder, changes, dropped=()):
    """The decoder's configuration after `changes` to the file, `dropped` keys left out."""
    file = folder / "config.json"
    content = json.loads(file.read_text())
    kept = {key: value for key, value in content.items() if key not in dropped}
    file.write_text(json.dumps(kept | changes))
    try:
        return load_model(folder, torch.float32)[0]
    finally:
        file.write_text(json.dumps(content))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """A function from the name of a case to its directory, written once."""
    written = {}

    def find(name):
        if name not in written:
            written[name] = tmp_path_factory.mktemp("model")
            reference(name).save_pretrained(written[name])
        return written[name]

    return find


OLDER = {
    "llama, llama3 rope": {
        "rope_theta": 10_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "llama, linear rope": {"rope_scaling": {"type": "linear", "factor": 4.0}},
    "gemma2": {},
    "gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 10_000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 6,
    },
    "qwen2, windows": {"rope_theta": 10_000.0},
    "phi3, longrope": {
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [2.0 + i for i in range(8)],
        }
    },
}


@pytest.mark.parametrize("name", OLDER)
def test_older_files_say_the_same_in_other_keys(folder_of, name):
    """`rope_scaling` beside `rope_theta`, a pattern instead of a list of layer types."""
    folder = folder_of(name)
    newer = config_of(folder, {})
    assert config_of(folder, OLDER[name], ("rope_parameters", "layer_types")) == newer


def test_windows_follow_the_family(folder_of):
    window = WINDOW
    assert config_of(folder_of("gemma2"), {}).windows == (window, 0, window)
    assert config_of(folder_of("gemma3"), {}).windows == (window,) * 5 + (0, window)
    assert config_of(folder_of("qwen2, windows"), {}).windows == (0, window, window)
    mistral = folder_of("mistral")
    assert config_of(mistral, {}).windows == (window,) * 3
    assert config_of(mistral, {}, ["sliding_window"]).windows == (4096,) * 3
    assert config_of(mistral, {"sliding_window": None}).windows == (0,) * 3


def test_longrope_serves_its_first_length(folder_of):
    """Past it the frequencies of everything already cached would change."""
    config = config_of(folder_of("phi3, longrope"), {})
    assert config.context_length == 400
    assert msgspec.structs.asdict(config.rope)["magnitude"] > 1


@pytest.mark.parametrize(
    ("name", "change", "what", "reason"),
    [
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation", "'gelu'"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types", "3 of"),
        ("gemma2", {"layer_types": ["mamba"] * 3}, "layer_types", "mamba"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention", "True"),
        ("gemma3", {"model_type": "gemma3"}, "model_type", "'gemma3'"),
        (
            "phi3",
            {"rope_parameters": {"partial_rotary_factor": 0.45}},
            "rope_scaling.partial_rotary_factor",
            "7 of 16",
        ),
        (
            "phi3, longrope",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            "rope_scaling.short_factor",
            "1 factors for 8",
        ),
        (
            "qwen3, yarn rope",
            {"rope_parameters": {"rope_type": "yarn", "factor": 4, "beta_fast": 1e308}},
            "rope_scaling.rope_type",
            "gives no numbers",
        ),
        ("qwen2", {"rope_parameters": {"factor": "four"}}, "rope_scaling", "$.factor"),
        ("qwen3", {"head_dim": 16}, "model.layers.0.self_attn.q_norm.weight", "expected [16]"),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused_by_key(folder_of, name, change, what, reason):
    with pytest.raises(ModelFileError) as caught:
        config_of(folder_of(name), change)
    assert (caught.value.what, reason in caught.value.reason) == (what, True), caught.value
