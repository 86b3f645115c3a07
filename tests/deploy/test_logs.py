"""Logs are bounded and can be followed."""

from pathlib import Path

import pytest

from deploy import logs
from deploy.errors import ClusterError


def test_a_log_is_cut_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written before is kept once; a process that appends goes on in the same file."""
    monkeypatch.setattr(logs, "BYTES_MAX", 10)
    log = tmp_path / "gateway-0.log"
    with log.open("ab", buffering=0) as process:
        process.write(b"the first lines\n")
        logs.cap(log)
        process.write(b"more\n")
        logs.cap(log)

    assert log.read_text() == "more\n"
    assert (tmp_path / "gateway-0.log.1").read_text() == "the first lines\n"


def test_the_end_of_a_log_is_read_from_its_end(tmp_path: Path) -> None:
    """Only the last lines are read, however long the log is."""
    log = tmp_path / "nats.log"
    log.write_text("".join(f"line {n}\n" for n in range(100_000)) + "\n")

    assert logs.tail(log, 2) == [b"line 99999", b""]
    assert logs.last_line(log) == "line 99999"
    assert logs.tail(tmp_path / "none.log", 2) == []
    assert "wrote nothing" in logs.last_line(tmp_path / "none.log")


def test_one_log_is_found_by_name(tmp_path: Path) -> None:
    """A name chooses its log; an unknown one lists those there are."""
    for name in ("nats", "gateway-0"):
        (tmp_path / f"{name}.log").write_text("")

    assert [log.stem for log in logs.find(tmp_path, "")] == ["gateway-0", "nats"]
    assert [log.stem for log in logs.find(tmp_path, "nats")] == ["nats"]
    with pytest.raises(ClusterError, match="there are: gateway-0, nats"):
        logs.find(tmp_path, "gateway-1")
