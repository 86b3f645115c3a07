"""A gateway before a played mesh, and the official client of it."""

from collections.abc import AsyncIterator

import openai
import pytest

from tests.services.gateway.fake_mesh import Front, front


@pytest.fixture
async def edge() -> AsyncIterator[Front]:
    async with front() as running:
        yield running


@pytest.fixture
async def client(edge: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with edge.client() as client:
        yield client
