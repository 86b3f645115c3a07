"""In fp32 an answer does not depend on who else is asking: a slice of `make invariance`."""

from tests.mesh.cluster import Mesh
from tests.mesh.invariance import differing, requests


async def test_answers_are_the_same_one_by_one_and_many_at_once(mesh: Mesh) -> None:
    """Text, number of ids, finish and logprobs, greedy and drawn, with and without stops."""
    bodies = requests(40, tokens=8)
    assert await differing(mesh, bodies) == []
    await mesh.quiet()


def test_the_requests_are_mixed() -> None:
    """Half greedy, half drawn; each mode also with stop strings and logprobs; all different."""
    bodies = requests(200, tokens=48)
    assert len({body["prompt"] for body in bodies}) == 200
    assert sum(body["temperature"] == 0 for body in bodies) == 100
    for greedy in (True, False):
        for field in ("stop", "logprobs"):
            assert any(field in b for b in bodies if (b["temperature"] == 0) == greedy)
    assert bodies == requests(200, tokens=48)
