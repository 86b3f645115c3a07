"""A NATS server with JetStream, its streams empty for each test."""

from collections.abc import AsyncIterator

import pytest

from services.gateway.stored.config import StoredConfig
from services.gateway.stored.store import Store
from services.gateway.stored.streams import JOBS, LOGS
from shared.jetstream import JetStream
from shared.nats_bus import NatsBus
from shared.subjects import job, stored
from shared.testing import eventually
from tests.services.gateway.stored.kit import keeping


@pytest.fixture
async def store(bus: NatsBus) -> AsyncIterator[Store]:
    """A gateway's store on a server that holds nothing yet."""
    store = Store(bus, StoredConfig(poll_s=0.2))
    async with keeping(store):
        await eventually(lambda: not store.why_not, what="the streams")
        await empty(store.jetstream)
        yield store
        await empty(store.jetstream)


async def empty(jetstream: JetStream) -> None:
    await jetstream.purge(LOGS, stored())
    await jetstream.purge(JOBS, job())
