"""A Redis, a bus, and a worker that lends its slots and wants all of them back."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from redis import Redis

from deploy.servers import Running, Server, start_redis
from shared.testing import MemoryBroker
from tests.services.kv_tier.kit import Lender


@pytest.fixture
def redis(redis_server: Server) -> Iterator[Redis]:
    """Another's view of the server, which is empty."""
    with Redis.from_url(redis_server.url) as client:
        client.flushall()
        yield client


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Running]:
    """A server to ill-treat."""
    server = start_redis(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def worker(broker: MemoryBroker) -> AsyncIterator[Lender]:
    lender = await Lender(broker).listen()
    yield lender
    assert lender.slots.num_free == lender.slots.num_slots, "a slot was lost"
    lender.slots.close()
