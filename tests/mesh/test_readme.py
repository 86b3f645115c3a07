"""README does not lie."""

import asyncio
import re
import sys
from pathlib import Path

from tests.mesh.cluster import Mesh

README = Path(__file__).parents[2] / "README.md"
BUS = README.parent / "docs" / "bus.md"


def script(page: Path) -> str:
    """The one Python block of a page."""
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    return str(block)


async def run(source: str) -> str:
    """What a script prints; it must end well."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", source),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:  # a test that gives up must not leave a client behind
            process.kill()
    assert process.returncode == 0, said.decode()
    return said.decode()


async def test_the_script_in_the_readme_works_as_printed(mesh: Mesh) -> None:
    """The client script runs as printed, but for the port and the name of the mesh under test."""
    source = script(README).replace("http://127.0.0.1:8000", mesh.base_url)

    assert len(await run(source)) > 5


async def test_the_script_for_the_bus_works_as_printed(mesh: Mesh) -> None:
    """So does the one for NATS, but for the run directory."""
    source = script(BUS).replace(".run/default", str(mesh.run_dir))

    assert len(await run(source)) > 5
