"""The head of a GGUF file, written by hand, byte by byte, sound and broken."""

import os
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.gguf_file import ModelFileError, read_gguf

F32, Q4_0 = 0, 2
UINT32, STRING, ARRAY = 4, 8, 9


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def key(name, kind, payload):
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name, shape=(4,), kind=F32, offset=0):
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + dims + struct.pack("<IQ", kind, offset)


def gguf(tensors=(), keys=(), data_bytes=64, alignment=32):
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys)) + b"".join((*keys, *tensors))
    return head + bytes(-len(head) % alignment + data_bytes)


def array(kind, count, payload=b""):
    return struct.pack("<IQ", kind, count) + payload


def test_tensors_lie_where_the_table_says(tmp_path):
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf([tensor("a"), tensor("b", (32, 1), Q4_0, 32)]))
    found = read_gguf(file).tensors
    assert [(info.shape, info.num_bytes) for info in found.values()] == [((4,), 16), ((1, 32), 18)]
    assert found["b"].offset - found["a"].offset == 32


@pytest.mark.parametrize(
    ("content", "what", "reason"),
    [
        (gguf([tensor("a", offset=32), tensor("a")]), "a", "named twice"),
        (gguf([tensor("")]), "tensor 0 of 1", "no name"),
        (gguf([tensor("a", offset=8)]), "a", "no multiple of 32"),
        (gguf([tensor("a", (16,)), tensor("b", offset=32)]), "b", "overlaps"),
        (gguf([tensor("a", (16,), offset=32)]), "a", "truncated"),
        (gguf([tensor("a", offset=1 << 62)]), "a", "truncated"),
        (gguf([tensor("a", (1 << 62, 1 << 62))]), "a", "truncated"),
        (gguf([tensor("a", (1,) * 5)]), "a", "5 dimensions"),
        (gguf(keys=[key("k", UINT32, bytes(4))] * 2), "k", "named twice"),
        (gguf(keys=[key("k", 99, b"")]), "k", "unknown value type 99"),
        (gguf(keys=[key("k", STRING, struct.pack("<Q", 1 << 60))]), "k", "more than"),
        (gguf(keys=[key("k", STRING, text("\0" * 4)[:-1] + b"\xff")]), "k", "not UTF-8"),
        (gguf(keys=[key("k", ARRAY, array(UINT32, 1 << 60))]), "k", "more than"),
        (gguf(keys=[key("k", ARRAY, array(UINT32, 1 << 20))]), "k", "truncated"),
        (gguf(keys=[key("k", ARRAY, array(ARRAY, 1, array(ARRAY, 1)))]), "k", "type 9"),
        (gguf(keys=[key("general.alignment", UINT32, bytes(4))]), "general.alignment", "0"),
        (gguf()[:20], "header", "truncated"),
        (b"GGML" + gguf()[4:], "header", "not a GGUF file"),
        (b"", "file", "empty"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_head_is_refused_by_key_or_tensor(tmp_path, content, what, reason):
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        read_gguf(file)
    assert (caught.value.what, reason in caught.value.reason) == (what, True), caught.value


def test_what_is_no_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none"):
        with pytest.raises(ModelFileError, match="no regular file"):
            read_gguf(path)


NUMBERS = st.sampled_from([0, 1, 3, 4, 16, 31, 32, 64, 96, 1 << 31, (1 << 64) - 1])


@given(
    table=st.lists(
        st.tuples(
            st.text("abc", max_size=2),
            st.lists(NUMBERS, max_size=6),
            st.sampled_from([*range(16), 30, 1 << 30]),
            NUMBERS,
        ),
        max_size=4,
    ),
    data_bytes=st.integers(0, 200),
)
@settings(max_examples=300, deadline=None)
def test_whatever_the_table_says_no_tensor_lies_outside_or_in_another(
    tmp_path_factory, table, data_bytes
):
    """Any table is refused with a name and a reason, or its tensors lie apart and in the file."""
    file = tmp_path_factory.getbasetemp() / "table.gguf"
    file.write_bytes(gguf([tensor(*entry) for entry in table], data_bytes=data_bytes))
    try:
        tensors = read_gguf(file).tensors
    except ModelFileError as error:
        tensors = {}
        named = error.what and error.reason
    else:
        named = True
    assert named
    taken = 0
    for info in sorted(tensors.values(), key=lambda info: info.offset):
        assert info.offset % 32 == 0
        assert taken <= info.offset
        taken = info.offset + info.num_bytes
    assert taken <= file.stat().st_size
