"""API keys: who may ask, and as which tenant. Pure."""

import hashlib
import hmac

from services.gateway.config import ApiKeys, shared_prefixes
from shared.errors import Unauthorized


class Keys:
    """Key -> tenant. With no keys configured everybody is the tenant ""."""

    def __init__(self, api_keys: ApiKeys) -> None:
        self._shares = shared_prefixes(api_keys)
        self._tenants = [
            (_digest(key), holder if isinstance(holder, str) else holder.tenant)
            for key, holder in api_keys.items()
        ]

    def shares_prefixes(self, tenant: str) -> bool:
        """Whether the tenant's prompts may be answered from what others have cached, and theirs
        from its own.
        """
        return self._shares.get(tenant, False)

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
