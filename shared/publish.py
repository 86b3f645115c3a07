"""A message as NATS wants it published. Pure.

NATS closes the connection for good over one bad line, so nothing bad may get that far: neither
from our own bugs, nor from a reply subject that an outsider chose.
"""

import functools
import re
from collections.abc import Mapping

from shared.bus import Delivery
from shared.errors import InvalidRequest

MAX_SUBJECT = 1024  # with the reply; the server closes the connection for a line over 4096

_HEADER = re.compile(r"[A-Za-z0-9-]+: [\x20-\x7e]*", re.ASCII)
_SUBJECT = re.compile(r"[^\s.*>\x00-\x1f]+(\.[^\s.*>\x00-\x1f]+)*", re.ASCII)
_INBOX = re.compile(r"_INBOX\." + _SUBJECT.pattern, re.ASCII)


@functools.lru_cache(maxsize=4096)
def _encoded_subject(subject: str) -> bytes:
    """The bytes of a subject to publish on; raises `InvalidRequest`."""
    if not _SUBJECT.fullmatch(subject) or not subject.isascii():
        raise InvalidRequest(f"{subject[:80]!r} is not a subject", param="subject")
    return subject.encode()


def is_inbox(subject: str) -> bool:
    """Whether an outsider may be answered there: an `_INBOX.` subject that NATS takes, with room
    for a reply of ours. An answer to any other could do harm.
    """
    fits = len(subject) <= MAX_SUBJECT // 2
    return fits and subject.isascii() and bool(_INBOX.fullmatch(subject))


def publish_command(delivery: Delivery, max_payload: int) -> bytes:
    """The protocol line, headers and payload; raises `InvalidRequest` for what the server would
    answer by closing the connection for good (D7: it counts the headers too).
    """
    subject, payload, reply, headers = delivery
    size = len(headers) + len(payload)
    if size > max_payload:
        raise InvalidRequest(f"{size} bytes are over the bus's limit of {max_payload}")
    if len(subject) + len(reply) > MAX_SUBJECT:
        raise InvalidRequest(f"subject and reply are over {MAX_SUBJECT} bytes", param="subject")
    to = _encoded_subject(subject)
    if reply:
        to = b"%b %b" % (to, _encoded_subject(reply))
    if headers:
        return b"HPUB %b %d %d\r\n%b%b\r\n" % (to, len(headers), size, headers, payload)
    return b"PUB %b %d\r\n%b\r\n" % (to, size, payload)


def write_headers(headers: Mapping[str, str] | None) -> bytes:
    """Headers as NATS wants them, b"" for none; raises `InvalidRequest`."""
    if not headers:
        return b""
    lines = [f"{name}: {value}" for name, value in headers.items()]
    for line in lines:
        if not _HEADER.fullmatch(line):
            raise InvalidRequest(f"{line[:80]!r} is not a header", param="headers")
    return "\r\n".join(["NATS/1.0", *lines, "", ""]).encode()


def read_headers(headers: bytes) -> tuple[int, dict[str, str]]:
    """The status (0 = none) and the headers of a delivery."""
    first, *lines = headers.decode(errors="replace").split("\r\n")
    status = first.removeprefix("NATS/1.0").strip()[:3]
    pairs = (line.partition(":") for line in lines if line)
    return int(status) if status.isdigit() else 0, {name: value.strip() for name, _, value in pairs}
