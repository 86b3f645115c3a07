"""Two clusters that the tests of this folder share, and a client for each."""

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.mesh.cluster import Mesh


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """The default cluster on the real model, in the precision whose texts do not depend on who
    shares a batch.
    """
    options = ("gpu_worker.dtype=fp32", "gateway.header_timeout_s=2", "gateway.body_timeout_s=2")
    with Mesh(tmp_path_factory.mktemp("real"), *options) as running:
        yield running


@pytest.fixture
async def client(mesh: Mesh) -> AsyncIterator[openai.AsyncOpenAI]:
    """The official client of the default cluster."""
    async with mesh.client() as client:
        yield client


@pytest.fixture
def sim_mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A fresh cluster of two simulated workers, for tests that break it."""
    run_dir = tmp_path_factory.mktemp("sim")
    with Mesh(run_dir, "--engine", "sim", "gpu_worker.replicas=2") as running:
        yield running


@pytest.fixture
def sim_mesh_small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    """A cluster whose one simulated worker runs one leg at a time, slowly."""
    run_dir = tmp_path_factory.mktemp("small")
    with Mesh(
        run_dir, "--engine", "sim", "gpu_worker.max_legs=1", "gpu_worker.sim.step_ms=20"
    ) as m:
        yield m
