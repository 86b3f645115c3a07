"""Names of KV blocks: a block hash says which ids, after which prefix, for which tenant."""

import hashlib
import hmac
from collections.abc import Sequence

from shared.ids import pack_ids

BLOCK_SIZE = 16  # tokens per block; one AVX512 register of scores
HASH_SIZE = 16  # bytes
SHORT_SIZE = 8  # bytes of a hash by which a scheduler knows a block; a clash costs a bad guess

BlockHash = bytes


def tenant_salt(secret: bytes, tenant: str | None, cache_salt: str = "") -> bytes:
    """The root of a tenant's block hashes: tenants share no block unless they share a salt. None =
    the salt of all tenants that chose to share.
    """
    name = b"\xff" if tenant is None else tenant.encode()  # no tenant's name begins with that byte
    return hmac.digest(secret, name + b"\0" + cache_salt.encode(), "sha256")


def block_hashes(ids: Sequence[int], salt: bytes, block_size: int = BLOCK_SIZE) -> list[BlockHash]:
    """Chained hashes of the full blocks of `ids`: len(ids) // block_size of them.

    blake2b-128 over (salt, parent hash, ids of the block). Keys longer than 64 bytes are not
    allowed by blake2b; `tenant_salt` makes 32.
    """
    parent = b""
    hashes: list[BlockHash] = []
    for start in range(0, len(ids) - block_size + 1, block_size):
        parent = extend_hash(parent, ids[start : start + block_size], salt)
        hashes.append(parent)
    return hashes


def extend_hash(parent: BlockHash, block_ids: Sequence[int], salt: bytes) -> BlockHash:
    """The hash of one full block that follows the block `parent` (b"" at the start)."""
    return hashlib.blake2b(parent + pack_ids(block_ids), digest_size=HASH_SIZE, key=salt).digest()
