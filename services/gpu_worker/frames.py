"""Frames on the socket pair between the I/O process and the engine. Pure.

A frame is a little-endian u32 length and a body. To the engine: one byte of `Kind`, and the payload
off the bus as it came. From the engine: a u16 length, the subject, and the payload for the bus.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

_LENGTH = struct.Struct("<I")
_SUBJECT = struct.Struct("<H")


class Kind(IntEnum):
    """What a frame to the engine is. The end of the stream means: move all legs, then exit."""

    MESSAGE = 0  # encoded `ToWorker`
    SLEPT = 1
    CONNECTION_LOST = 2
    RECONNECTED = 3
    REFUSE_NEW = 4


class FrameReader:
    """Cuts a byte stream into bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The bodies that `data` completes, in order. Exhaust it before the next call."""
        self._buffer += data
        start, size = 0, len(self._buffer)
        while size - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            end = start + _LENGTH.size + length
            if end > size:
                break
            yield bytes(self._buffer[start + _LENGTH.size : end])
            start = end
        del self._buffer[:start]


def command(kind: Kind, payload: bytes = b"") -> bytes:
    """A frame to the engine."""
    return _LENGTH.pack(1 + len(payload)) + bytes([kind]) + payload


def parse_command(body: bytes) -> tuple[Kind, bytes]:
    return Kind(body[0]), body[1:]


def publication(subject: str, payload: bytes) -> bytes:
    """A frame from the engine: publish `payload` on `subject`."""
    name = subject.encode()
    head = _SUBJECT.pack(len(name)) + name
    return _LENGTH.pack(len(head) + len(payload)) + head + payload


def parse_publication(body: bytes) -> tuple[str, bytes]:
    (length,) = _SUBJECT.unpack_from(body)
    end = _SUBJECT.size + length
    return body[_SUBJECT.size : end].decode(), body[end:]
