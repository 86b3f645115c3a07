"""A gateway before a played mesh, and two on a real JetStream, and official clients of them."""

from collections.abc import AsyncIterator

import openai
import pytest

from deploy.servers import Server
from tests.services.gateway.fake_mesh import Front, front
from tests.services.gateway.pair import STORED, Clients, Pair
from tests.services.gateway.stored.duo import duo


@pytest.fixture
async def edge() -> AsyncIterator[Front]:
    async with front() as running:
        yield running


@pytest.fixture
async def client(edge: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with edge.client() as client:
        yield client


@pytest.fixture
async def pair(nats_server: Server) -> AsyncIterator[Pair]:
    async with duo(nats_server, STORED) as running:
        pair = Pair(running)
        yield pair
        pair.script.stuck_after = None
        await pair.quiet()


@pytest.fixture
async def clients(pair: Pair) -> AsyncIterator[Clients]:
    async with pair.client(0) as a, pair.client(1) as b:
        yield [a, b]
