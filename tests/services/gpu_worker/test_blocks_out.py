"""Blocks that leave a model and come into another: bit for bit what that one would compute."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.gpu_worker.loader import load_model
from services.gpu_worker.loader.fingerprint import kv_fingerprint
from services.gpu_worker.loader.packed import FOLDER, PackedCache
from services.gpu_worker.loader.source import Source
from services.gpu_worker.model_runner import DecoderRunner, load_runner
from shared.kv import BLOCK_SIZE
from shared.model_files import default_model
from tests.mesh.tiny_model import write_tiny_model
from tests.services.gpu_worker.legs_kit import Legs, assert_as_good, block, carried

PRECISIONS = {
    "fp32": {"dtype": "fp32", "quantize": "none"},
    "bf16": {"dtype": "bf16", "quantize": "none"},
    "int8": {"dtype": "auto", "quantize": "w8a8"},
    "fp32, KV in int8": {"dtype": "fp32", "quantize": "none", "kv_dtype": "int8"},
    "int8, KV in int8": {"dtype": "auto", "quantize": "w8a8", "kv_dtype": "int8"},
}
IDS = [(7 * i * i + 3 * i + 1) % 250 for i in range(5 * BLOCK_SIZE + 9)]


def load(path: Path, precision: str = "fp32", **changes: Any) -> DecoderRunner:
    settings: dict[str, Any] = {
        "num_blocks": 40,
        "kv_bytes_max": 0,
        "max_model_len": None,
        "num_threads": 1,
        "step_threads": 1,
        "progress": [].append,
    }
    return load_runner(path, **(settings | PRECISIONS[precision] | changes))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.parametrize("precision", [*PRECISIONS])
def test_another_worker_computes_the_same_bytes_and_goes_on_from_them(
    tiny: Path, precision: str
) -> None:
    """Whatever the chunks in which each computed them; a leg that goes on from carried blocks
    makes the ids and logprobs of one that computed its own.
    """
    first, second = Legs(load(tiny, precision)), Legs(load(tiny, precision))
    leg, own = first.add(IDS), second.add(IDS)
    first.run({leg: 30}, 6)
    second.run({own: 30 if precision == "bf16" else 7}, 1)
    full = len(IDS) // BLOCK_SIZE
    ours = [block(first.runner, index) for index in leg.block_table[:full]]
    theirs = [block(second.runner, index) for index in own.block_table[:full]]
    assert ours == theirs
    assert len({*ours}) == full

    twin = carried(leg, first, second)
    assert twin.num_computed_tokens == full * BLOCK_SIZE
    (more,) = second.run({twin: 50}, 4)
    (same,) = first.run({leg: 1}, 10)
    assert more == same[6:]
    assert first.runner.spec.kv_fingerprint == second.runner.spec.kv_fingerprint


def test_carried_blocks_of_the_default_model_are_as_good_as_its_own() -> None:
    """In int8 (`test_model_runner` has fp32): logprobs after them are bitwise the same."""
    runner = load(default_model(), "int8", cache=PackedCache(FOLDER, 8 << 30))
    assert_as_good(Legs(runner), IDS)


# --- who may share ------------------------------------------------------------------------------


def test_who_computes_otherwise_shares_nothing(tiny: Path, tmp_path: Path) -> None:
    """Other weights, sizes, precision: another fingerprint. Another path: the same."""
    prints = {precision: load(tiny, precision).spec.kv_fingerprint for precision in PRECISIONS}
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    assert load(copy).spec.kv_fingerprint == prints["fp32"]
    assert load(copy, "int8", step_threads=2).spec.kv_fingerprint == prints["int8"]
    prints["threads"] = load(copy, num_threads=2).spec.kv_fingerprint

    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0}))
    prints["rope"] = load(copy).spec.kv_fingerprint
    (copy / "config.json").write_text(json.dumps(config))
    weights = load_file(copy / "model.safetensors")
    weights["model.norm.weight"][3] += 1e-3
    save_file(weights, copy / "model.safetensors")
    prints["weights"] = load(copy).spec.kv_fingerprint

    assert len({*prints.values()}) == len(prints)
    assert {len(value) for value in prints.values()} == {16}


def test_files_that_changed_while_they_were_read_are_nobody_elses(
    tiny: Path, tmp_path: Path
) -> None:
    """What was loaded is not known, so the worker shares with itself alone. Nor where they are
    gone.
    """
    copy = tmp_path / "copy"
    shutil.copytree(tiny, copy)
    config, _ = load_model(copy, torch.float32)
    source = Source.of(copy)
    same = {kv_fingerprint(source, config, ["torch"]) for _ in range(2)}
    shutil.copy(tiny / "model.safetensors", copy / "model.safetensors")
    changed = {kv_fingerprint(source, config, ["torch"]) for _ in range(2)}
    shutil.rmtree(copy)
    gone = {kv_fingerprint(source, config, ["torch"]) for _ in range(2)}
    assert (len(same), len(same | changed | gone)) == (1, 5)
