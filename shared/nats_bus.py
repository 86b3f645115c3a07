"""The bus on NATS: nats-py, hardened."""

from collections.abc import Callable

from shared.bus import Delivery, Handler, Subscription
from shared.errors import InvalidRequest

MAX_SUBJECT = 1024  # subject and reply together; the server closes a connection for 4096


def check_publish(delivery: Delivery, max_payload: int) -> None:
    """Raise `InvalidRequest` for what the server would close the connection for."""
    if len(delivery.payload) > max_payload:
        raise InvalidRequest(
            f"message of {len(delivery.payload)} bytes is over the bus's {max_payload}"
        )


class NatsBus:
    """To be written."""

    def __init__(self) -> None:
        self.on_disconnected: Callable[[], None] = lambda: None
        self.on_reconnected: Callable[[], None] = lambda: None
        self.on_closed: Callable[[str], None] = lambda _reason: None

    @classmethod
    async def connect(cls, url: str, user: str, password: str, *, name: str) -> "NatsBus":
        raise NotImplementedError

    @property
    def connected(self) -> bool:
        raise NotImplementedError

    @property
    def reconnects(self) -> int:
        raise NotImplementedError

    def publish(self, subject: str, payload: bytes, reply: str = "") -> None:
        raise NotImplementedError

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        raise NotImplementedError

    async def request(self, subject: str, payload: bytes, timeout_s: float) -> Delivery:
        raise NotImplementedError

    async def flush(self, timeout_s: float = 2.0) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
