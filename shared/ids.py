"""Token ids on the wire: packed little-endian u32, four bytes an id."""

import array
import sys
from collections.abc import Iterable

assert array.array("I").itemsize == 4


def pack_ids(ids: Iterable[int]) -> bytes:
    """Pack `ids` (each 0 <= id < 2**32) as little-endian u32."""
    packed = array.array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """Unpack what `pack_ids` packed; raises `ValueError` when the length is not a multiple of 4."""
    ids = array.array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def count_ids(data: bytes) -> int:
    """How many ids `data` holds."""
    return len(data) // 4
