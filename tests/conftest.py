"""Real servers for the tests that need them: one NATS and one Redis per test run."""

import os
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from deploy.servers import Running, Server, ServerError, start_nats, start_redis
from shared.nats_bus import NatsBus


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Its `user` is of the internal account, its `public_user` of the public one."""
    yield from _started(lambda: start_nats(tmp_path_factory.mktemp("nats")))


@pytest.fixture
async def bus(nats_server: Server) -> AsyncIterator[NatsBus]:
    """A connection of an insider."""
    bus = await NatsBus.connect(
        nats_server.url, nats_server.user, nats_server.password, name="test"
    )
    yield bus
    await bus.close()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    yield from _started(lambda: start_redis(tmp_path_factory.mktemp("redis")))


def _started(start: Callable[[], Running]) -> Iterator[Server]:
    """A missing server skips on a laptop and fails in CI."""
    try:
        running = start()
    except ServerError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))
    yield running.server
    running.stop()
