"""A message as NATS wants it published. Pure.

NATS closes the connection for good over one bad line, so nothing bad may get that far: neither
from our own bugs, nor from a reply subject that an outsider chose.
"""

import functools
import re

from shared.errors import InvalidRequest

MAX_SUBJECT = 1024  # with the reply; the server closes the connection for a line over 4096

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


def publish_command(subject: str, payload: bytes, reply: str, max_payload: int) -> bytes:
    """The protocol line and payload; raises `InvalidRequest` for what the server would answer by
    closing the connection for good (D7). We send no headers, so the payload is all that counts.
    """
    if len(payload) > max_payload:
        raise InvalidRequest(f"{len(payload)} bytes are over the bus's limit of {max_payload}")
    if len(subject) + len(reply) > MAX_SUBJECT:
        raise InvalidRequest(f"subject and reply are over {MAX_SUBJECT} bytes", param="subject")
    to = _encoded_subject(subject)
    if reply:
        to = b"%b %b" % (to, _encoded_subject(reply))
    return b"PUB %b %d\r\n%b\r\n" % (to, len(payload), payload)
