"""Payloads smaller than what they hold: `int8` (lossy), `zstd` (lossless). `raw` needs none.

A codec may decline a block (None); it is then written raw. The frame says which one was used, so a
reader needs no setting.
"""

import numpy as np
import zstandard
from numpy.typing import NDArray

from services.kv_tier.frame import Codec

_GROUP = 32  # consecutive values: of one head, and of neighbouring channels or positions
_SCALE_BYTES = 2
_ITEM_BYTES = {"bf16": 2, "fp32": 4}
_PAYS = 0.9  # of the block's size; above it reading back costs more than it saves
_LEVEL = 1


def encode(codec: Codec, dtype: str, block: memoryview) -> bytes | None:
    """The payload of `block`; None = leave it as it is."""
    if codec == "int8":
        return _encode_int8(dtype, block)
    return _encode_zstd(dtype, block) if codec == "zstd" else None


def decode(codec: Codec, dtype: str, payload: memoryview, into: memoryview) -> bool:
    """Fill `into`; False = that is no payload of a block of this size."""
    if codec == "int8":
        return _decode_int8(dtype, payload, into)
    return codec == "zstd" and _decode_zstd(dtype, payload, into)


# --- int8: 32 values share a scale; each is off by half a step of it at most ----------------------


def _encode_int8(dtype: str, block: memoryview) -> bytes | None:
    """Scales (fp16), then values (int8): 0.53 of bf16, 0.27 of fp32."""
    if dtype not in _ITEM_BYTES or len(block) % (_GROUP * _ITEM_BYTES[dtype]):
        return None
    values = _read_floats(dtype, block).reshape(-1, _GROUP)
    exact = np.abs(values).max(axis=1) / 127
    with np.errstate(over="ignore", invalid="ignore"):
        scales = exact.astype(np.float16)
        too_small = scales.astype(np.float32) < exact
        scales = np.where(too_small, np.nextafter(scales, np.float16(np.inf)), scales)
    if not np.isfinite(scales).all():  # nor are the values, or they are huge
        return None
    steps = scales.astype(np.float32)
    steps[steps == 0] = 1  # of nothing but zeros
    whole = np.rint(values / steps[:, None]).astype(np.int8)
    return bytes(scales.tobytes() + whole.tobytes())


def _decode_int8(dtype: str, payload: memoryview, into: memoryview) -> bool:
    if dtype not in _ITEM_BYTES or len(into) % (_GROUP * _ITEM_BYTES[dtype]):
        return False
    groups = len(into) // _ITEM_BYTES[dtype] // _GROUP
    if len(payload) != groups * (_SCALE_BYTES + _GROUP):
        return False
    at = groups * _SCALE_BYTES
    scales = np.frombuffer(payload[:at], np.float16).astype(np.float32)
    whole = np.frombuffer(payload[at:], np.int8).reshape(groups, _GROUP)
    _write_floats(dtype, whole * scales[:, None], into)
    return True


def _read_floats(dtype: str, block: memoryview) -> NDArray[np.float32]:
    if dtype == "fp32":
        return np.frombuffer(block, np.float32)
    halves = np.frombuffer(block, np.uint16).astype(np.uint32)
    return (halves << 16).view(np.float32)


def _write_floats(dtype: str, values: NDArray[np.float32], into: memoryview) -> None:
    flat = values.ravel()
    if dtype == "fp32":
        np.frombuffer(into, np.float32)[:] = flat
        return
    bits = flat.view(np.uint32)
    to_even = 0x7FFF + ((bits >> 16) & 1)
    np.frombuffer(into, np.uint16)[:] = (bits + to_even) >> 16


# --- zstd: signs and exponents repeat, mantissas do not; apart, the former compress ---------------


def _encode_zstd(dtype: str, block: memoryview) -> bytes | None:
    size = _ITEM_BYTES.get(dtype, 1)
    if len(block) % size:
        return None
    planes = np.frombuffer(block, np.uint8).reshape(-1, size).T.copy()
    payload: bytes = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True).compress(
        planes.data
    )
    return payload if len(payload) <= _PAYS * len(block) else None


def _decode_zstd(dtype: str, payload: memoryview, into: memoryview) -> bool:
    size = _ITEM_BYTES.get(dtype, 1)
    try:
        if zstandard.frame_content_size(payload) != len(into) or len(into) % size:
            return False
        planes = zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError:
        return False
    into[:] = np.frombuffer(planes, np.uint8).reshape(size, -1).T.tobytes()
    return True
