"""Arrays in a file: what is mapped is what was written, or it is refused."""

import numpy as np
import pytest

from services.gpu_worker.loader.array_file import Damaged, map_arrays, write_arrays

ARRAYS = {
    "bytes": np.arange(-7, 8, dtype=np.int8).reshape(3, 5),
    "halves": np.array([0, 1, 0xFFFF], dtype=np.uint16),
    "numbers": np.array([[1.5, float("-inf")], [float("nan"), -0.0]], dtype=np.float32),
    "whole line": np.arange(16, dtype=np.int32),
    "one": np.array([7], dtype=np.int32),
}


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "file"
    with path.open("wb") as file:
        write_arrays(file, "key", ARRAYS)
    return path


def test_arrays_come_back_bit_for_bit(path):
    """Types, shapes, names and their order too; each begins at a line, and none can be written."""
    found = map_arrays(path, "key")
    assert [*found] == [*ARRAYS]
    for name, array in found.items():
        assert (array.dtype, array.shape) == (ARRAYS[name].dtype, ARRAYS[name].shape)
        assert array.tobytes() == ARRAYS[name].tobytes()
        assert array.ctypes.data % 64 == 0
        assert not array.flags.writeable


def test_a_mapped_file_may_be_removed(path):
    found = map_arrays(path, "key")
    path.unlink()
    assert found["one"][0] == 7


def test_a_flipped_bit_is_noticed_in_every_byte(path):
    """Of the head, the table, the arrays, and the zeros between them."""
    whole = path.read_bytes()
    for place in range(len(whole)):
        broken = bytearray(whole)
        broken[place] ^= 1 << place % 8
        path.write_bytes(broken)
        with pytest.raises(Damaged):
            map_arrays(path, "key")


def test_every_other_length_is_noticed(path):
    whole = path.read_bytes()
    for size in (*range(0, len(whole), 3), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(Damaged):
            map_arrays(path, "key")
    path.write_bytes(whole + b"\0")
    with pytest.raises(Damaged):
        map_arrays(path, "key")


def test_the_file_of_another_key_is_refused(path):
    with pytest.raises(Damaged, match="another key"):
        map_arrays(path, "other")


def test_what_is_no_file_is_told_apart(tmp_path):
    """None there is a miss without a word; a directory in its place is damage."""
    with pytest.raises(FileNotFoundError):
        map_arrays(tmp_path / "none", "key")
    with pytest.raises(Damaged):
        map_arrays(tmp_path, "key")
