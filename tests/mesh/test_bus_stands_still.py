"""The bus stands still while every connection stays up: nobody has died, so nobody is moved."""

import asyncio
import os
import signal

from tests.mesh.cluster import Mesh
from tests.mesh.test_failover import answer, begun

STANDS_S = 1.5  # a death takes one second; a connection may be given up, with a loss, after two


async def test_a_paused_nats_delays_streams_and_moves_none(sim_mesh: Mesh) -> None:
    """SIGSTOP of the server under 8 streams: all finish with the text of a calm run, on the workers
    where they began.
    """
    async with sim_mesh.client() as client:
        calm = await asyncio.gather(*(answer(client, sim_mesh.model, n) for n in range(8)))
        (nats,) = sim_mesh.processes("nats")
        streams = await begun(client, sim_mesh.model)
        os.kill(nats["pid"], signal.SIGSTOP)
        await asyncio.sleep(STANDS_S)
        ended = sum(stream.done() for stream in streams)
        os.kill(nats["pid"], signal.SIGCONT)
        stood = await asyncio.gather(*streams)

    assert ended == 0, "the fault did not hit all of them"
    assert stood == calm
    assert (await sim_mesh.metrics()).get("shoal:redrives_total", 0) == 0
    assert sim_mesh.restarts() == 0
    await sim_mesh.quiet()
