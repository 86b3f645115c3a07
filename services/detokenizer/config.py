"""The `[detokenizer]` table of the cluster file."""

from msgspec import Struct


class Config(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one detokenizer process."""

    max_legs: int = 4096  # a few KB each; beyond it new legs fail as overloaded
    lease_s: float = 5.0  # a leg with no record for so long is dropped (protocol, lease)
    tombstone_s: float = 60.0  # how long an ended leg's late records are known as late
    max_tombstones: int = 16384  # newest are kept
    complain_s: float = 0.25  # the same lost leg is reported at most so often
