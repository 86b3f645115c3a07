"""What can be done to connections, to messages, and to Redis."""

from collections.abc import Iterable

from redis.asyncio import Redis
from redis.exceptions import OutOfMemoryError

from tests.chaos.nats_proxy import MessageRule, NatsProxy, Verb
from tests.chaos.nemesis import PROOF_S, Field, NotInjected, seen
from tests.shared.proxy import Direction, Proxy, Weather

SUBJECTS = {
    "gateway": "mesh.v1.in.gateway-*",
    "tokenizer": "mesh.v1.in.tokenizer-*",
    "scheduler": "mesh.v1.in.scheduler-*",
    "gpu_worker": "mesh.v1.in.gpu_worker-*",
    "detokenizer": "mesh.v1.in.detokenizer-*",
    "kv_tier": "mesh.v1.in.kv_tier-*",
    "beats": "mesh.v1.beat.*",
    "beacons": "mesh.v1.beacon.*",
}
"""What a rule for messages can be about: a role's mailbox, or everybody's heartbeats."""


class Bad:
    """Bad weather for the links of one role ("" = all) in front of NATS or Redis."""

    def __init__(
        self,
        server: str,
        prefix: str = "",
        *,
        latency_s: float = 0.0,
        held: Iterable[Direction] = (),
        cuts: int = 0,
    ) -> None:
        self._server = server
        self._weather = Weather(prefix, latency_s=latency_s, held=held, cuts=cuts)

    async def inject(self, field: Field) -> str:
        proxy_of(field, self._server).weather = self._weather
        await seen(lambda: self._weather.touched > 0, f"bytes of {self._server} meet the weather")
        return f"{self._weather.touched} bytes held, late or cut by then"

    async def heal(self) -> None:
        self._weather.clear()


class Reset:
    """All links of one role ("" = all) are reset at once."""

    def __init__(self, server: str, prefix: str = "") -> None:
        self._server = server
        self._prefix = prefix

    async def inject(self, field: Field) -> str:
        cut = proxy_of(field, self._server).cut(self._prefix)
        if not cut:
            raise NotInjected(f"no link of {self._prefix or 'anybody'} to {self._server}")
        return f"{cut} links reset"

    async def heal(self) -> None:
        """They connect again."""


class Messages:
    """Some messages to one role are dropped, sent twice, late, or overtaken."""

    def __init__(self, verb: Verb, to: str, share: float) -> None:
        self._verb = verb
        self._to = to
        self._share = share
        self._proxy: NatsProxy | None = None

    async def inject(self, field: Field) -> str:
        self._proxy = field.site.nats
        rule = MessageRule(self._verb, SUBJECTS[self._to], self._share, field.rng.getrandbits(32))
        self._proxy.rule = rule
        await seen(lambda: rule.hits > 0, f"a message to {self._to} to {self._verb}")
        return f"{rule.hits} messages by then"

    async def heal(self) -> None:
        if self._proxy is not None:
            self._proxy.rule = None


class Flush:
    """Redis forgets everything."""

    async def inject(self, field: Field) -> str:
        async with Redis.from_url(field.site.redis_url()) as redis:
            await redis.set("chaos", 1, ex=60)
            await redis.flushall()
            if await redis.dbsize() != 0:
                raise NotInjected("Redis still holds keys")
        return "0 keys"

    async def heal(self) -> None:
        """The cache fills again."""


class Full:
    """Redis has no memory left, and nothing that it may evict."""

    def __init__(self) -> None:
        self._before = ""
        self._url = ""

    async def inject(self, field: Field) -> str:
        self._url = field.site.redis_url()
        async with Redis.from_url(field.site.redis_url()) as redis:
            self._before = (await redis.config_get("maxmemory"))["maxmemory"]
            await redis.config_set("maxmemory", 1)
            try:
                await redis.set("chaos", 1)
            except OutOfMemoryError as error:
                return str(error)
        raise NotInjected("Redis still takes keys")

    async def heal(self) -> None:
        async with Redis.from_url(self._url, socket_timeout=PROOF_S) as redis:
            await redis.config_set("maxmemory", self._before)


def proxy_of(field: Field, server: str) -> Proxy:
    return field.site.nats if server == "nats" else field.site.redis
