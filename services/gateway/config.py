"""Settings of a gateway: the `[gateway]` table of cluster.toml."""

from msgspec import Struct

from services.gateway.stored.config import StoredConfig
from shared.config import AboveZero, Count, NotNegative, Port


class KeyHolder(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who a key stands for."""

    tenant: str
    shared_prefix: bool = False  # cached prefixes are shared with all tenants that say so, too: how
    # fast an answer begins then tells each of them what the others have asked lately


ApiKeys = dict[str, str | KeyHolder]
"""Key -> its tenant, or more about it."""


class GatewayConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every limit of the edge, with its unit and why it has that value."""

    host: str = "127.0.0.1"  # used only when no listening socket is inherited
    port: Port = 0  # 0 = any free port
    api_keys: ApiKeys = {}  # empty = open, for a loopback cluster

    body_bytes_max: Count = 8 << 20  # 413 beyond
    large_bytes_max: Count = 64 << 20  # bodies over 256 KB of all open requests; 429 beyond
    wire_bytes_max: Count = 7 << 20  # of one prompt on the bus, whose own limit is 8 MB; 413 beyond
    header_timeout_s: AboveZero = 30.0  # dripping headers, idle keep-alive; > clients' pools (5 s)
    body_timeout_s: AboveZero = 10.0  # 408 beyond
    write_timeout_s: AboveZero = 10.0  # a reader that takes nothing for so long is cut
    ping_s: AboveZero = 12.0  # silence before `: ping`; proxies cut idle streams at 15-60 s
    patience_s: AboveZero = 45.0  # no token yet: begin the stream anyway, before a proxy's 60 s

    request_timeout_s: AboveZero = 600.0  # default and upper bound of X-Request-Timeout-Ms
    sessions_max: Count = 4096  # 429 beyond; as many questions to tokenizers beside them
    choices_max: Count = 256  # prompts x n of one request
    prompt_logprobs_max: Count = 1 << 20  # of all open requests, 0.3 KB each; 429 beyond
    feed_ids_max: Count = 65536  # undelivered ids held for one slow reader, then it is cut
    drain_s: NotNegative = 10.0  # running streams may finish after SIGTERM, then they are told

    stored: StoredConfig = StoredConfig()

    ping_bus_s: AboveZero = 1.0  # liveness probe of a client on the bus
    probe_timeout_s: AboveZero = 0.8  # a live client need not answer; a dead one does not, at once

    def __post_init__(self) -> None:
        shared_prefixes(self.api_keys)


def shared_prefixes(api_keys: ApiKeys) -> dict[str, bool]:
    """Tenant -> whether it shares cached prefixes. A stored request knows its tenant but not the
    key, so all keys of a tenant must say the same; raises `ValueError`.
    """
    shares: dict[str, bool] = {}
    for holder in api_keys.values():
        who = KeyHolder(tenant=holder) if isinstance(holder, str) else holder
        if shares.setdefault(who.tenant, who.shared_prefix) != who.shared_prefix:
            raise ValueError(f"api_keys of {who.tenant!r} do not agree about shared_prefix")
    return shares
