"""A model that makes NaN of one request, as its client, its neighbours and the operator see it."""

import asyncio
from pathlib import Path

import openai
import pytest

from tests.mesh.cluster import Mesh

BAD_ID = 77


async def test_a_request_that_breaks_the_numbers_ends_alone_and_is_counted(tmp_path: Path) -> None:
    """It is tried again twice, then ends with an error; a stream beside it says what it says
    alone; `/metrics` tells how often a leg failed and what came of the request.
    """
    with Mesh(tmp_path, "--engine", "sim", f"gpu_worker.sim.nan_id={BAD_ID}") as mesh:
        async with mesh.client() as client:

            async def answer(prompt: list[int]) -> str:
                made = await client.completions.create(
                    model=mesh.model,
                    prompt=prompt,
                    max_tokens=60,
                    seed=1,
                    extra_body={"ignore_eos": True},
                )
                return made.choices[0].text

            calm = await answer([1, 2, 3])
            beside = asyncio.create_task(answer([1, 2, 3]))
            with pytest.raises(openai.InternalServerError, match="NaN"):
                await answer([1, 2, BAD_ID])
            assert await beside == calm
        await mesh.quiet(within_s=60)
        text = await mesh.metrics_text()

    assert counted(text, "shoal:redrives_total", 'cause="fault"') == 3  # the last is the end
    assert counted(text, "vllm:request_success_total", 'finished_reason="error"') == 1


def counted(text: str, name: str, label: str) -> float:
    """The value of one metric in Prometheus's text."""
    (line,) = [line for line in text.splitlines() if line.startswith(name) and label in line]
    return float(line.rpartition(" ")[2])
