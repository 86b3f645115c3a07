"""Blocks over one connection to Redis: are they there, read them into slots, write them from slots.

One key per block, one value per key. Blocks of one call are kept equally long: what would go first
from the middle of a prefix would take all behind it along. The key names the model too, so that
models which differ in anything that counts do not see each other's blocks.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar

from msgspec import Struct

from services.kv_tier.config import Config
from services.kv_tier.frame import (
    HEADER,
    Buffer,
    Frame,
    Reason,
    check_name,
    check_payload,
    read_header,
    write_header,
)
from services.kv_tier.resp import Connection, Refused, command, set_command
from shared.kv import BlockHash

FORMAT = 1  # of the value; another format is another key
_ROUND = 256  # keys asked for in one round trip
_AHEAD = 2  # values on their way: Redis copies one while we check the one before

T = TypeVar("T")


def block_key(fingerprint: bytes, block_hash: BlockHash) -> bytes:
    """The Redis key of a block."""
    return b"kv:%d:%s:%s" % (FORMAT, fingerprint.hex().encode(), block_hash.hex().encode())


class Name(Struct, frozen=True):
    """What a block is: whose, and of which ids."""

    fingerprint: bytes
    block_hash: BlockHash

    @property
    def key(self) -> bytes:
        return block_key(self.fingerprint, self.block_hash)


class Wanted(Struct, eq=False):
    """A block to read into a slot; `outcome` says how that went, "" = it could not be asked for."""

    name: Name
    into: memoryview
    outcome: Literal["", "loaded", "gone"] | Reason = ""
    value_bytes: int = 0


class Offered(Struct, eq=False):
    """A block to write from a slot; `outcome` as above."""

    name: Name
    block: memoryview
    dtype: str
    outcome: Literal["", "written", "known", "refused"] = ""
    value_bytes: int = 0


def exist(connection: Connection, names: Sequence[Name], deadline: float) -> list[bool]:
    """Whether each of these is there. Raises `Unavailable`, as all here do, and `Refused`."""
    commands = [command(b"EXISTS", name.key) for name in names]
    return [bool(answer) for answer in _ask(connection, commands, deadline)]


def read(connection: Connection, wanted: Sequence[Wanted], config: Config, deadline: float) -> None:
    """Read them, and keep longer what is used. What is not what it should be is deleted."""
    keep_ms = config.again_ms()

    def send(block: Wanted) -> None:
        key = block.name.key
        question = command(b"GET", key)
        if keep_ms is not None:
            question += command(b"PEXPIRE", key, b"%d" % keep_ms)
        connection.send([question], deadline)

    for block in _ahead(wanted, send):
        size = connection.read_size(deadline)
        if size is None:
            block.outcome = "gone"
        else:
            block.value_bytes = size
            block.outcome = _take(connection, block, size, deadline) or "loaded"
        if config.admission != "never":
            connection.read(deadline)
    bad = [block.name.key for block in wanted if block.outcome not in {"", "loaded", "gone"}]
    _ask(connection, [command(b"DEL", key) for key in bad], deadline)


def write(
    connection: Connection, offered: Sequence[Offered], config: Config, deadline: float
) -> None:
    """Write those that are missing; the others are used a second time."""
    left_ms = _ask(connection, [command(b"PTTL", block.name.key) for block in offered], deadline)
    missing = []
    longer = []
    first_ms, keep_ms = config.first_ms(), config.again_ms()
    for block, left in zip(offered, left_ms, strict=True):
        if left == _NO_KEY:
            missing.append(block)
            continue
        block.outcome = "known"
        if keep_ms is not None and _EXPIRED < left < keep_ms:
            longer.append(command(b"PEXPIRE", block.name.key, b"%d" % keep_ms))
    _ask(connection, longer, deadline)

    def send(block: Offered) -> None:
        value = _value(block, config)
        block.value_bytes = sum(len(part) for part in value)
        connection.send(set_command(block.name.key, value, first_ms), deadline)

    for block in _ahead(missing, send):
        try:
            connection.read(deadline)
            block.outcome = "written"
        except Refused:  # it is full, and nothing may be evicted
            block.outcome = "refused"


def use(connection: Connection, names: Sequence[Name], config: Config, deadline: float) -> int:
    """Running legs would need these again: keep them, if they are there, at least for so long. How
    many are there.
    """
    left_ms = _ask(connection, [command(b"PTTL", name.key) for name in names], deadline)
    longer = []
    keep_ms = config.running_ms()
    for name, left in zip(names, left_ms, strict=True):
        if _EXPIRED < left < keep_ms:
            longer.append(command(b"PEXPIRE", name.key, b"%d" % keep_ms))
    _ask(connection, longer, deadline)
    return sum(left != _NO_KEY for left in left_ms)


_NO_KEY, _EXPIRED = -2, -1
"""Answers to PTTL that are no time: no such key; one that does not expire, and so is not ours."""


def _ask(connection: Connection, commands: Sequence[bytes], deadline: float) -> list[int]:
    """The numbers that these are answered with, in few round trips."""
    answers = []
    for start in range(0, len(commands), _ROUND):
        batch = commands[start : start + _ROUND]
        connection.send([b"".join(batch)], deadline)
        answers += [connection.read_number(deadline) for _ in batch]
    return answers


def _ahead(blocks: Sequence[T], send: Callable[[T], None]) -> Iterator[T]:
    """Each block when its answer is to be read; `_AHEAD` of them are asked for by then."""
    sent = 0
    for index, block in enumerate(blocks):
        for following in blocks[sent : index + _AHEAD]:
            send(following)
            sent += 1
        yield block


def _take(
    connection: Connection, block: Wanted, value_bytes: int, deadline: float
) -> Reason | None:
    """Read one value into its slot, or past it; why it cannot be used."""
    header = bytearray(min(HEADER, value_bytes))
    connection.read_into(memoryview(header), deadline)
    frame = read_header(header, value_bytes)
    reason = frame if isinstance(frame, str) else _fault(frame, block)
    if reason is not None or isinstance(frame, str):
        connection.skip(value_bytes - len(header), deadline)
        connection.end_value(deadline)
        return reason
    payload = block.into
    if frame.codec != "raw":
        payload = memoryview(bytearray(frame.payload_bytes))
    connection.read_into(payload, deadline)
    connection.end_value(deadline)
    reason = check_payload(header, payload)
    if reason is not None or frame.codec == "raw":
        return reason
    from services.kv_tier.codecs import decode  # noqa: PLC0415 numpy takes 0.1 s; raw needs none

    return None if decode(frame.codec, frame.dtype, payload, block.into) else "undecodable"


def _fault(frame: Frame, block: Wanted) -> Reason | None:
    """Is this header, which may be anything, of this block and of the size of its slot?"""
    size = len(block.into)
    fits = frame.payload_bytes == size or (frame.codec != "raw" and frame.payload_bytes < size)
    if frame.decoded_bytes != size or not fits:
        return "length"
    return check_name(frame, block.name.fingerprint, block.name.block_hash)


def _value(block: Offered, config: Config) -> list[Buffer]:
    payload: Buffer = block.block
    codec = config.codec
    if codec != "raw":
        from services.kv_tier.codecs import encode  # noqa: PLC0415 see above

        payload = encode(codec, block.dtype, block.block) or block.block
        codec = "raw" if payload is block.block else codec
    frame = Frame(
        codec,
        block.dtype,
        block.name.fingerprint,
        block.name.block_hash,
        len(payload),
        len(block.block),
    )
    return [write_header(frame, payload), payload]


def tally(blocks: Sequence[Wanted | Offered]) -> Counter[str]:
    """Blocks by outcome, and bytes."""
    counts: Counter[str] = Counter(block.outcome or "unanswered" for block in blocks)
    counts["bytes"] = sum(block.value_bytes for block in blocks if block.outcome)
    return counts
