"""What tests of stored requests share."""

import contextlib
import time
from collections.abc import AsyncIterator

from services.gateway.stored.events import Event, Submitted, encode_event
from services.gateway.stored.store import Logged, Store
from services.gateway.stored.streams import LOGS
from shared.jetstream import WrongLastSequence
from shared.subjects import stored

R = "r" * 32


@contextlib.asynccontextmanager
async def keeping(store: Store) -> AsyncIterator[None]:
    """`store` looks after its streams inside."""
    store.start()
    try:
        yield
    finally:
        await store.close()


def submitted(tenant: str = "t", body: bytes = b'{"a":1}', timeout_s: float = 60.0) -> Submitted:
    return Submitted(
        tenant=tenant, endpoint="chat", body=body, created=time.time(), timeout_s=timeout_s
    )


async def put(store: Store, *events: Event, request_id: str = R) -> int:
    """Append `events` to the log, whatever it holds and whoever else appends; the sequence of the
    last.
    """
    last = 0
    for event in events:
        there = False
        while not there:
            entries = await store.jetstream.read(LOGS, stored(request_id), last)
            last = entries[-1].seq if entries else last
            with contextlib.suppress(WrongLastSequence):
                last = await store.jetstream.append(stored(request_id), encode_event(event), last)
                there = True
    return last


async def follow(store: Store, tenant: str = "t", request_id: str = R) -> list[Logged]:
    """The whole log, once it has ended."""
    return [logged async for logged in store.follow(request_id, tenant)]
