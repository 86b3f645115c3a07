"""A block as L2 keeps it: 64 bytes that say what it is, then what its codec made of it. Pure.

    magic 4s | version B | codec B | dtype B | 0 B | payload bytes Q | fingerprint 16s |
    block hash 16s | decoded bytes Q | checksum Q            (little-endian)

The checksum is xxh3-64 of the payload, seeded with that of the 56 bytes before it. So a flipped bit
anywhere, a value cut short, of another version, of another model or of another block is seen, and
whatever is seen is a miss.
"""

import struct
from typing import Literal

import xxhash
from msgspec import Struct

from shared.kv import HASH_SIZE, BlockHash

Buffer = bytes | bytearray | memoryview

HEADER = 64
VERSION = 1
FINGERPRINT_SIZE = 16

Codec = Literal["raw", "int8", "zstd"]
Reason = Literal[
    "short", "magic", "version", "codec", "fingerprint", "hash", "length", "checksum", "undecodable"
]
"""Why a value is not believed."""

_MAGIC = b"SHKV"
_FIELDS = struct.Struct("<4sBBBBQ16s16sQ")
_CHECKSUM = struct.Struct("<Q")
_CODECS: tuple[Codec, ...] = ("raw", "int8", "zstd")  # their places are on the wire
_DTYPES = ("", "bf16", "fp32")  # "" = of no kind that a codec knows

assert _FIELDS.size + _CHECKSUM.size == HEADER


class Frame(Struct, frozen=True):
    """What a header says."""

    codec: Codec
    dtype: str
    fingerprint: bytes
    block_hash: BlockHash
    payload_bytes: int
    decoded_bytes: int


def write_header(frame: Frame, payload: Buffer) -> bytes:
    """The header of this payload. A fingerprint is 0 to 16 bytes."""
    assert len(frame.block_hash) == HASH_SIZE
    assert len(frame.fingerprint) <= FINGERPRINT_SIZE
    fields = _FIELDS.pack(
        _MAGIC,
        VERSION,
        _CODECS.index(frame.codec),
        _DTYPES.index(frame.dtype) if frame.dtype in _DTYPES else 0,
        0,
        frame.payload_bytes,
        frame.fingerprint,
        frame.block_hash,
        frame.decoded_bytes,
    )
    return fields + _CHECKSUM.pack(_checksum(fields, payload))


def read_header(header: bytes | bytearray, value_bytes: int) -> Frame | Reason:
    """What the header of a value of `value_bytes` says, or why it says nothing."""
    if len(header) < HEADER:
        return "short"
    magic, version, codec, dtype, _, payload_bytes, fingerprint, block_hash, decoded_bytes = (
        _FIELDS.unpack_from(header)
    )
    if magic != _MAGIC:
        return "magic"
    if version != VERSION:
        return "version"
    if codec >= len(_CODECS) or dtype >= len(_DTYPES):
        return "codec"
    if payload_bytes != value_bytes - HEADER:
        return "short" if payload_bytes > value_bytes - HEADER else "length"
    return Frame(
        _CODECS[codec], _DTYPES[dtype], fingerprint, block_hash, payload_bytes, decoded_bytes
    )


def check_name(frame: Frame, fingerprint: bytes, block_hash: BlockHash) -> Reason | None:
    """Is it of this model, and this block?"""
    if frame.fingerprint != fingerprint.ljust(FINGERPRINT_SIZE, b"\0"):
        return "fingerprint"
    return None if frame.block_hash == block_hash else "hash"


def check_payload(header: bytes | bytearray, payload: Buffer) -> Reason | None:
    """Are header and payload, bit by bit, what was written?"""
    (checksum,) = _CHECKSUM.unpack_from(header, _FIELDS.size)
    fields = memoryview(header)[: _FIELDS.size]
    return None if _checksum(fields, payload) == checksum else "checksum"


def _checksum(fields: Buffer, payload: Buffer) -> int:
    return int(xxhash.xxh3_64_intdigest(payload, xxhash.xxh3_64_intdigest(fields)))
