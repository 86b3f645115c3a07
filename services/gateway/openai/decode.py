"""Bytes of a client -> a typed request, or an `InvalidRequest` that names the field."""

import contextlib
import gc
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidRequest

T = TypeVar("T")

DEPTH_MAX = 32  # of anything a client nests; templates and tools stay below 10
VALUES_MAX = 1 << 16  # in what a client nests: 16 for each of 4,096 messages
_FIELD = re.compile(r"\$\.(\w+)")
_MISSING = re.compile(r"missing required field `(\w+)`")


def decode(body: bytes, kind: type[T], packed: bool = False) -> T:
    """`body` as `kind`: JSON, or MessagePack if `packed`. Unknown fields are ignored.

    Raises `InvalidRequest` for bad UTF-8, bad syntax, trailing data, numbers that JSON cannot
    hold, nesting that does not end, and fields of another type.
    """
    try:
        with _uncollected():
            if packed:
                return _unpack(body, kind)
            body.decode()  # msgspec does not look into the strings that it skips
            return msgspec.json.decode(body, type=kind)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The body is not valid UTF-8 (byte {error.start}).") from error
    except msgspec.ValidationError as error:
        field = _FIELD.search(str(error)) or _MISSING.search(str(error))
        raise InvalidRequest(
            f"Invalid request: {error}.", param=field[1] if field else None
        ) from error
    except msgspec.DecodeError as error:
        form = "MessagePack" if packed else "JSON"
        raise InvalidRequest(f"We could not parse the {form} body of your request: {error}.") from (
            error
        )
    except RecursionError as error:
        raise InvalidRequest("The body is nested too deeply.") from error


def _unpack(body: bytes, kind: type[T]) -> T:
    """The keys of a map may be numbers, as MessagePack has them, or strings, as JSON has them."""
    try:
        return msgspec.msgpack.decode(body, type=kind)  # builds nothing of what it does not know
    except msgspec.ValidationError:
        return msgspec.convert(msgspec.msgpack.decode(body), kind, str_keys=True)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Eight megabytes of `[[],[],...` take 8 s while the collector looks at them again and again,
    1 s while it does not.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def check_plain(value: Any, param: str) -> None:
    """Only what JSON knows, integers of 64 bits, at most `DEPTH_MAX` deep, `VALUES_MAX` in all.

    What passes can travel on the bus. Raises `InvalidRequest`.
    """
    level = [value]
    count = 0
    for _ in range(DEPTH_MAX):
        count += len(level)
        if count > VALUES_MAX:
            raise InvalidRequest(f"'{param}' has more than {VALUES_MAX} values.", param=param)
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                if not all(isinstance(key, str) for key in item):
                    raise InvalidRequest(f"Keys in '{param}' must be strings.", param=param)
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
            else:
                _check_scalar(item, param)
        if not inner:
            return
        level = inner
    raise InvalidRequest(f"'{param}' is nested more than {DEPTH_MAX} deep.", param=param)


def _check_scalar(item: Any, param: str) -> None:
    if isinstance(item, int) and not -(2**63) <= item < 2**64:
        raise InvalidRequest(f"'{param}' holds an integer beyond 64 bits.", param=param)
    if item is not None and not isinstance(item, str | int | float | bool):
        raise InvalidRequest(f"'{param}' holds a value that JSON cannot.", param=param)
