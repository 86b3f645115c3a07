"""A request that ends whoever reads it, in virtual time: it alone fails, after three deaths."""

import pytest
from msgspec.structs import replace

from tests.protocol_mesh import Mesh, Node
from tests.protocol_work import make_spec

LETHAL = "f" * 32
READS = {"detokenizer": b"StepDone", "tokenizer": b"Generate"}


class LethalMesh(Mesh):
    """A process of `role` dies when it is sent something of the request `LETHAL`."""

    role = ""
    deaths = 0

    def _arrive(self, node: Node, instance: str, payload: bytes) -> None:
        here = node.role == self.role and node.alive and node.instance == instance
        if here and LETHAL.encode() in payload and READS[self.role] in payload:
            self.deaths += 1
            self.crash(node, announced=True)
        else:
            super()._arrive(node, instance, payload)


@pytest.mark.parametrize("role", READS)
def test_a_request_that_ends_its_readers_fails_alone(role: str) -> None:
    """Requests beside it, old and new ones, have been there at some of the deaths."""
    for seed in range(6):
        mesh = LethalMesh(seed)
        mesh.role = role
        others = [mesh.open(make_spec(number), number) for number in range(16)]
        mesh.advance(0.3)
        spec = make_spec(3)
        # One leg, which is to run before all that waits.
        lethal = mesh.open(replace(spec, request_id=LETHAL, ids=spec.ids[:1], n=1, priority=0))
        for number in range(16, 24):
            mesh.advance(0.3)
            others.append(mesh.open(make_spec(number), number))
        mesh.until(mesh.ended, 60.0)
        assert lethal.end is not None
        assert lethal.end.error is not None
        errors = [client.end.error for client in others if client.end is not None]
        assert errors == [None] * len(others), f"seed {seed}"
        assert mesh.deaths == 3, f"seed {seed}"
