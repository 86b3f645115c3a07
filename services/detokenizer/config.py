"""The `[detokenizer]` table of the cluster file."""

from msgspec import Struct

from shared.config import AboveZero, Count


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one detokenizer process."""

    max_legs: Count = 4096  # a few KB each; beyond it new legs fail as overloaded
    lease_s: AboveZero = 5.0  # a leg with no record for so long is dropped (protocol, lease)
    tombstone_s: AboveZero = 60.0  # how long an ended leg's late records are known as late
    max_tombstones: Count = 16384  # newest are kept
    complain_s: AboveZero = 0.25  # the same lost leg is reported at most so often
