"""A cluster comes up beside others, takes other models, and leaves nothing behind."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest

from tests.mesh.cluster import Mesh, alive, slots_of
from tests.mesh.tiny_model import write_tiny_model


def leftovers(run_dir: Path) -> list[str]:
    """Processes that name the run directory, and anything in it but logs."""
    processes = [
        f"{process.pid} {' '.join(process.cmdline())}"
        for process in psutil.process_iter()
        if process.pid != os.getpid() and any(str(run_dir) in part for part in cmdline(process))
    ]
    files = [str(path) for path in run_dir.iterdir() if path.name != "logs"]
    return processes + files


def with_children(pids: list[int]) -> list[int]:
    children = [psutil.Process(pid).children(recursive=True) for pid in pids]
    return pids + [child.pid for some in children for child in some]


def mapped() -> set[str]:
    """All memory of workers that any process of this host has mapped."""
    return {inode for pid in psutil.pids() for inode in slots_of(pid)}


def cmdline(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


async def test_two_clusters_and_nothing_left(tmp_path: Path) -> None:
    """Two clusters serve side by side; one taken down and one killed leave nothing, nor the memory
    that their workers lend.
    """
    first, second = (Mesh(tmp_path / name, "--engine", "sim") for name in ("a", "b c"))
    first.start()
    second.start()
    assert first.port != second.port
    for mesh in (first, second):
        async with mesh.client() as client:
            done = await client.completions.create(
                model=mesh.model, prompt="x " * 100, max_tokens=4
            )
            assert done.choices[0].finish_reason == "length"
    pids = [process["pid"] for mesh in (first, second) for process in mesh.processes()]
    assert all(alive(pid) for pid in pids)
    memory = {inode for pid in with_children(pids) for inode in slots_of(pid)}
    assert len(memory) == 2

    first.stop()
    os.kill(second.status()["supervisor_pid"], signal.SIGKILL)
    async with asyncio.timeout(20):
        while any(map(alive, pids)) or leftovers(second.run_dir) or memory & mapped():
            await asyncio.sleep(0.05)

    assert leftovers(first.run_dir) == []
    for mesh in (first, second):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(mesh.host, mesh.port)


async def test_a_hugging_face_directory_serves_and_its_template_may_refuse(tmp_path: Path) -> None:
    """MODEL= takes a Hugging Face directory; a template that raises is a 400 with its words. Its
    generation_config is what a request gets that says nothing else.
    """
    model = write_tiny_model(tmp_path / "tiny-llama")
    with Mesh(tmp_path / "run", "--model", str(model)) as mesh:
        assert mesh.model == "tiny-llama"
        async with mesh.client() as client:
            answer = await client.chat.completions.create(
                model=mesh.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=4
            )
            assert answer.choices[0].finish_reason in {"length", "stop"}
            with pytest.raises(openai.BadRequestError, match="roles must alternate"):
                await client.chat.completions.create(
                    model=mesh.model, messages=[{"role": "assistant", "content": "Hi"}]
                )

            async def draw(seed: int, **said: Any) -> str:
                done = await client.completions.create(
                    model=mesh.model, prompt="x", max_tokens=12, seed=seed, extra_body=said
                )
                return done.choices[0].text

            assert len({await draw(seed) for seed in range(3)}) == 1
            assert len({await draw(seed, temperature=1) for seed in range(3)}) > 1


async def test_a_slow_reader_loses_only_its_own_stream(sim_mesh: Mesh) -> None:
    """A client that does not read is cut and its blocks freed, while another finishes."""
    body = {"model": sim_mesh.model, "prompt": "x", "max_tokens": 8000, "stream": True}
    body |= {"ignore_eos": True, "n": 8}
    async with aiohttp.ClientSession(read_bufsize=1024) as session, sim_mesh.client() as client:
        stalled = await session.post(f"{sim_mesh.base_url}/v1/completions", json=body)
        assert stalled.status == 200
        done = await client.completions.create(model=sim_mesh.model, prompt="y", max_tokens=50)
        assert done.choices[0].finish_reason
        await sim_mesh.quiet(within_s=90)
        stalled.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--model", "/nowhere/model.gguf"], "/nowhere/model.gguf"),
        (["gateway.no_such_key=1"], "no_such_key"),
    ],
)
def test_what_cannot_start_says_why(tmp_path: Path, options: list[str], words: str) -> None:
    """A cluster that cannot start says why in one sentence and leaves nothing."""
    told = Mesh(tmp_path / "run").shoal("up", "--port", "0", *options)

    assert told.returncode != 0
    assert words in told.stderr
    assert "Traceback" not in told.stderr + told.stdout


async def test_up_ends_with_an_answer_and_the_base_url(tmp_path: Path) -> None:
    """`shoal up` as `make up` calls it: an answer, then where to ask; `shoal chat` asks there."""
    mesh = Mesh(tmp_path / "run")
    told = mesh.shoal("up", "--port", "0", "--engine", "sim")
    try:
        assert told.returncode == 0, told.stdout + told.stderr
        *_, question, answer, _, where = told.stdout.splitlines()
        status = mesh.status()
        assert question.startswith("> ")
        assert len(answer.split()) > 10
        assert where.startswith(f"http://127.0.0.1:{status['port']}/v1 ")
        chat = mesh.shoal("chat", "--once", "And why?")
        assert (chat.returncode, len(chat.stdout.split()) > 10) == (0, True)
    finally:
        mesh.stop()


async def test_down_tells_a_stream_that_outlasts_the_drain(tmp_path: Path) -> None:
    """`cluster.drain_s` is the gateways' too: what still runs then ends with a typed error."""
    mesh = Mesh(tmp_path / "run", "--engine", "sim", "cluster.drain_s=1")
    mesh.start()
    try:
        async with mesh.client() as client:
            stream = await client.completions.create(
                model=mesh.model,
                prompt="x",
                max_tokens=8000,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            await anext(stream)
            stopping = asyncio.create_task(asyncio.to_thread(mesh.stop))
            with pytest.raises(openai.APIError) as caught:
                [_ async for _ in stream]
            assert caught.value.code == "unavailable"
            await stopping
    finally:
        mesh.stop()
