"""API keys: who may ask, and as which tenant. Pure."""

import hashlib
import hmac

from shared.errors import Unauthorized


class Keys:
    """Key -> tenant. With no keys configured everybody is the tenant ""."""

    def __init__(self, api_keys: dict[str, str]) -> None:
        self._tenants = [(_digest(key), tenant) for key, tenant in api_keys.items()]

    def tenant(self, key: str | None) -> str:
        """The tenant of `key`; raises `Unauthorized`.

        Digests are compared in constant time and all of them always, so that time tells nothing.
        """
        if not self._tenants:
            return ""
        if not key:
            raise Unauthorized(
                "You didn't provide an API key. Use 'Authorization: Bearer YOUR_KEY'."
            )
        found: str | None = None
        digest = _digest(key)
        for known, tenant in self._tenants:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise Unauthorized("Incorrect API key provided.")
        return found


def bearer(authorization: str | None) -> str | None:
    """The key in an `Authorization` header."""
    scheme, _, key = (authorization or "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
