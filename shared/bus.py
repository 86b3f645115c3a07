"""The bus as Shoal sees it. `shared.nats_bus` is the real one, `shared.testing` has the fake."""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol


class Delivery(NamedTuple):
    """One message as it came off the bus."""

    subject: str
    payload: bytes
    reply: str = ""
    headers: bytes = b""  # as NATS has them, status line first; `shared.publish.read_headers`


Headers = Mapping[str, str] | None

Handler = Callable[[Delivery], None]
"""Called on the loop, one delivery at a time per subscription; must return at once."""


class Subscription(Protocol):
    """A live subscription."""

    async def unsubscribe(self) -> None:
        """Stop delivery; messages already on this side of the server are still handled."""


class Bus(Protocol):
    """At-most-once publish and subscribe; FIFO per (publisher, subscription) while connected."""

    counters: Counter[str]
    """`dropped_publishes`, `reconnects`, and what else this bus has lost or mended."""

    @property
    def connected(self) -> bool:
        """False from the moment a disconnect is known until the reconnect is done."""

    @property
    def reconnects(self) -> int:
        """How often the connection was re-established; a changed value means messages were lost."""

    def publish(
        self, subject: str, payload: bytes, reply: str = "", headers: Headers = None
    ) -> None:
        """Queue for sending; never blocks, never waits. While disconnected, payloads beyond the
        pending limit are dropped and counted. Raises `InvalidRequest` over `max_payload`, which
        headers count against.
        """

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        """Deliver `subject` (wildcards allowed) to `handler`; on return the server knows of it."""

    async def request(
        self, subject: str, payload: bytes, timeout_s: float, headers: Headers = None
    ) -> Delivery:
        """Publish with a private reply subject and wait. Raises `Unavailable` when nobody listens,
        `DeadlineExceeded` after `timeout_s`.
        """

    async def flush(self, timeout_s: float = 2.0) -> None:
        """On return the server has seen all published before. Raises `DeadlineExceeded`."""

    async def close(self) -> None:
        """Drain what was received, flush what was published, disconnect; bounded in time."""
