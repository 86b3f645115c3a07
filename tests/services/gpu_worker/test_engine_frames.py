"""What passes between the two processes of a worker arrives as it was sent."""

import os
import socket

from hypothesis import given
from hypothesis import strategies as st

from services.gpu_worker import status_page
from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.engine import Channel, Engine
from services.gpu_worker.engine_core import EngineCore
from services.gpu_worker.frames import (
    FrameReader,
    Kind,
    command,
    parse_command,
    parse_publication,
    publication,
)
from services.gpu_worker.simulated import SimulatedRunner
from services.gpu_worker.status_page import EngineStatus, StatusPage
from shared.messages import encode
from tests.services.gpu_worker.engine_kit import SIM, run


@given(
    commands=st.lists(st.tuples(st.sampled_from(Kind), st.binary(max_size=40))),
    cuts=st.lists(st.integers(1, 30), min_size=1),
)
def test_commands_survive_any_cut_of_the_stream(
    commands: list[tuple[Kind, bytes]], cuts: list[int]
) -> None:
    """However the bytes come in, the frames come out whole and in order."""
    stream = b"".join(command(kind, payload) for kind, payload in commands)
    reader = FrameReader()
    received = []
    turn = 0
    while stream:
        cut = cuts[turn % len(cuts)]
        received += [parse_command(body) for body in reader.feed(stream[:cut])]
        stream = stream[cut:]
        turn += 1

    assert received == commands


def test_a_publication_names_its_subject() -> None:
    """Subject and payload are told apart, empty payload included."""
    reader = FrameReader()
    frames = publication("mesh.v1.in.x", b"abc") + publication("é", b"")

    assert [parse_publication(body) for body in reader.feed(frames)] == [
        ("mesh.v1.in.x", b"abc"),
        ("é", b""),
    ]


def test_a_reader_sees_what_the_writer_wrote() -> None:
    """Two mappings of one page; nothing written yet reads as starting."""
    fd = status_page.create()
    writer, reader = StatusPage(fd), StatusPage(fd)
    os.close(fd)
    assert reader.read() == EngineStatus()
    writer.update(phase="prefill", detail="weights: é", phase_started=1.5, step=7, ready=1)
    writer.update(load=3)

    assert reader.read() == EngineStatus(
        phase="prefill", detail="weights: é", phase_started=1.5, step=7, ready=1, load=3
    )


def test_a_writer_that_is_stopped_inside_a_write_has_said_what_it_said_before() -> None:
    """Also to who has not looked since: a stopped engine that seemed idle would never be missed."""
    fd = status_page.create()
    writer, reader = StatusPage(fd), StatusPage(fd)
    os.close(fd)
    for step in range(1, 4):
        writer.update(phase="decode", step=step)
        at = status_page._body_at(writer._generation + 1)
        writer._memory[at : at + 100] = b"?" * 100
        assert reader.read() == EngineStatus(phase="decode", step=step)


def test_the_age_of_a_phase_counts_only_while_somebody_watched() -> None:
    """A watcher that slept begins to count anew; a phase without bound has no age."""
    status = EngineStatus(phase_started=10.0, phase_bound_ms=500)

    assert status.phase_age_ms(12.0) == 2000
    assert status.phase_age_ms(12.0, since=11.5) == 500
    assert status._replace(phase_bound_ms=0).phase_age_ms(12.0) == 0


def test_a_page_shows_during_a_step_what_was_taken_before_it() -> None:
    """A scheduler reads from it how full a worker is, and steps of a large model are long."""
    fd = status_page.create()
    writer, reader = StatusPage(fd), StatusPage(fd)
    os.close(fd)
    seen: list[EngineStatus] = []
    runner = SimulatedRunner(SIM, words=range(900), sleep=lambda _: seen.append(reader.read()))
    ours, theirs = socket.socketpair()
    ours.sendall(
        command(Kind.MESSAGE, encode(run())) + command(Kind.MESSAGE, encode(run(choice=1)))
    )
    ours.shutdown(socket.SHUT_WR)
    Engine(EngineCore("w-1", runner, WorkerConfig(), 0.0), Channel(theirs), writer).run()
    ours.close()
    assert [(at.phase, at.load + at.waiting) for at in seen[:1]] == [("prefill", 2)]
