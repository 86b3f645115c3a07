"""Which model is served, and under which name."""

from pathlib import Path

import pytest

from deploy.errors import ClusterError
from deploy.model import resolve


def test_the_default_model_is_the_one_that_is_installed() -> None:
    """It is found inside its wheel, whose code is never run."""
    model = resolve("")

    assert model.name == "smollm2-135m-instruct"
    assert model.path.suffix == ".gguf"
    assert model.bytes_on_disk == model.path.stat().st_size > 0


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-135m-instruct"),
        ("llama-3.2-1b-Q4_K_M.gguf", "llama-3.2-1b"),
        ("tiny.BF16.gguf", "tiny"),
        ("My Model (v2).gguf", "my-model-v2"),
        ("plain.gguf", "plain"),
    ],
)
def test_a_gguf_file_is_called_by_its_name_without_its_quantization(
    tmp_path: Path, file: str, name: str
) -> None:
    """A name says which model it is, and is easy to write in a request."""
    (tmp_path / file).write_bytes(b"GGUF")

    assert resolve(str(tmp_path / file)).name == name


def test_a_hugging_face_directory_is_called_by_its_name(tmp_path: Path) -> None:
    """A directory with a config.json is a model."""
    folder = tmp_path / "Tiny-Llama"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"x" * 10)

    assert resolve(str(folder)) == (folder, "tiny-llama", 10)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nowhere.gguf", "There is no model at .*nowhere.gguf"),
        ("empty", "a Hugging Face directory has a config.json"),
        ("notes.txt", "notes.txt is not a model"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, given: str, words: str) -> None:
    """A path that cannot be a model is refused before anything starts."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(ClusterError, match=words):
        resolve(str(tmp_path / given))
