"""A frame is believed whole or not at all; what a codec made comes back as it says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kv_tier.codecs import decode, encode
from services.kv_tier.frame import (
    HEADER,
    Frame,
    Reason,
    check_name,
    check_payload,
    read_header,
    write_header,
)

PRINT, NAME = b"f" * 16, b"n" * 16


def value_of(payload: bytes) -> bytes:
    frame = Frame("raw", "bf16", PRINT, NAME, len(payload), len(payload))
    return write_header(frame, payload) + payload


def fault(value: bytes, fingerprint: bytes = PRINT, block_hash: bytes = NAME) -> Reason | None:
    """As a reader checks it."""
    frame = read_header(value[:HEADER], len(value))
    if isinstance(frame, str):
        return frame
    return check_name(frame, fingerprint, block_hash) or check_payload(
        value[:HEADER], value[HEADER:]
    )


@given(st.binary(max_size=600))
def test_what_was_written_is_believed(payload: bytes) -> None:
    assert fault(value_of(payload)) is None


@given(st.binary(max_size=600), st.data())
def test_a_flipped_bit_anywhere_is_seen(payload: bytes, data: st.DataObject) -> None:
    value = bytearray(value_of(payload))
    bit = data.draw(st.integers(0, 8 * len(value) - 1))
    value[bit // 8] ^= 1 << bit % 8
    assert fault(bytes(value)) is not None


@given(st.binary(max_size=600), st.data())
def test_another_length_is_seen(payload: bytes, data: st.DataObject) -> None:
    """Cut short anywhere, or with something after it."""
    value = value_of(payload)
    assert fault(value[: data.draw(st.integers(0, len(value) - 1))]) == "short"
    assert fault(value + data.draw(st.binary(min_size=1, max_size=9))) == "length"


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_it_is_of_one_model_and_one_block(fingerprint: bytes, block_hash: bytes) -> None:
    value = value_of(b"payload")
    assert (fault(value, fingerprint=fingerprint) == "fingerprint") == (fingerprint != PRINT)
    assert (fault(value, block_hash=block_hash) == "hash") == (block_hash != NAME)


@pytest.mark.parametrize(("at", "reason"), [(0, "magic"), (4, "version"), (5, "codec")])
def test_the_reason_is_said(at: int, reason: str) -> None:
    value = bytearray(value_of(b"payload"))
    value[at] = 255
    assert fault(bytes(value)) == reason


def values(dtype: str, numbers: list[float]) -> bytes:
    """As a worker keeps them."""
    exact = np.array(numbers, np.float32)
    return (
        exact.tobytes() if dtype == "fp32" else (exact.view(np.uint32) >> 16).astype("u2").tobytes()
    )


def numbers(dtype: str, block: bytes) -> np.ndarray:
    if dtype == "fp32":
        return np.frombuffer(block, np.float32)
    return (np.frombuffer(block, np.uint16).astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@settings(max_examples=30)
@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=64, max_size=64))
def test_int8_is_off_by_half_a_step(dtype: str, drawn: list[float]) -> None:
    """Of its group of 32; and in bf16, by the rounding of the result."""
    block = values(dtype, drawn)
    payload = encode("int8", dtype, memoryview(block))
    assert payload is not None
    assert len(payload) == 2 * 2 + 64
    into = bytearray(len(block))
    assert decode("int8", dtype, memoryview(payload), memoryview(into))
    before, after = numbers(dtype, block).reshape(2, 32), numbers(dtype, bytes(into)).reshape(2, 32)
    peak = np.abs(before).max(axis=1, keepdims=True)
    step = peak / 127 * (1 + 2**-10) + 2**-24
    rounding = np.abs(after) * 2**-8 if dtype == "bf16" else np.abs(after) * 2**-22
    assert (np.abs(before - after) <= step / 2 + rounding + 1e-30).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e30])
def test_int8_declines_what_it_cannot_hold(bad: float) -> None:
    assert encode("int8", "fp32", memoryview(values("fp32", [bad] * 32))) is None
    assert encode("int8", "fp32", memoryview(bytes(100))) is None
    assert encode("int8", "digests", memoryview(bytes(128))) is None


@pytest.mark.parametrize(("dtype", "size"), [("bf16", 2), ("fp32", 4), ("digests", 1)])
@settings(max_examples=30)
@given(st.lists(st.floats(-4, 4, width=16), min_size=64, max_size=64), st.binary(max_size=40))
def test_zstd_loses_nothing(dtype: str, size: int, drawn: list[float], noise: bytes) -> None:
    """It declines what it does not make smaller; junk is no payload."""
    block = values("fp32" if size == 4 else "bf16", drawn)
    payload = encode("zstd", dtype, memoryview(block))
    into = bytearray(len(block))
    if payload is not None:
        assert len(payload) < len(block)
        assert decode("zstd", dtype, memoryview(payload), memoryview(into))
        assert into == block
        assert not decode("zstd", dtype, memoryview(payload), memoryview(bytearray(8)))
        assert not decode("zstd", dtype, memoryview(payload[:-3]), memoryview(into))
    assert not decode("zstd", dtype, memoryview(noise), memoryview(into))


def test_codecs_pay() -> None:
    """Of values as caches hold them, zstd takes the exponents together; of noise it takes none."""
    normal = np.random.default_rng(1).normal(size=4096).tolist()
    block = memoryview(values("bf16", normal))
    packed = encode("zstd", "bf16", block)
    assert packed is not None
    assert len(packed) < 0.9 * len(block)
    assert encode("zstd", "bf16", memoryview(np.random.default_rng(1).bytes(8192))) is None
