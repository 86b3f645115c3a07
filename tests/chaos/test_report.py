"""What a table says of its rounds: nothing that went wrong is hidden by what went right."""

from collections import Counter
from pathlib import Path

import pytest

from tests.chaos import report
from tests.chaos.checker import Verdict, Violation
from tests.chaos.nemesis import Kill
from tests.chaos.runner import SLEPT_S, Round
from tests.chaos.table import Experiment, table

EXPERIMENT = Experiment("kill", "gpu_worker", lambda: Kill("gpu_worker"), gap_p99_s=0.5)


def one(*rules: str, gap_s: float = 0.1, slept_s: float = 0.0) -> Round:
    """A round of one finished request that broke `rules`."""
    violations = [Violation(rule, "r", "why") for rule in rules]
    verdict = Verdict(1, Counter(finished=1), [gap_s], [0.2], violations)
    return Round(EXPERIMENT, 1, Path("history"), verdict, Counter(gap=2), 1.0, slept_s)


def cell(row: report.Row, head: str) -> str:
    return row.cells()[report.HEAD.index(head)]


@pytest.mark.parametrize(
    ("rule", "head"),
    [
        ("lost", "lost"),
        ("duplicated", "duplicated"),
        ("repeated", "duplicated"),
        ("different", "different"),
        ("foreign", "different"),
        ("usage", "different"),
        ("untyped", "untyped"),
        ("silent", "silent"),
        ("leaked", "leaked"),
    ],
)
def test_a_violation_of_one_round_fails_the_row(rule: str, head: str) -> None:
    """However many good rounds there are beside it; it is counted in its column."""
    [row] = report.rows([one(), one(rule), one()])
    assert (cell(row, "rounds"), cell(row, "requests"), cell(row, head)) == ("3", "3", "1")
    assert cell(row, "first") == "0.20"
    assert row.failed
    assert row.word() == "FAILED"
    assert report.violations(row.rounds[1])[0].startswith(f"  {rule}: r why")


def test_a_fault_that_was_not_there_is_not_ok() -> None:
    [row] = report.rows([one(), one("not_injected")])
    assert (row.failed, row.word()) == (True, "NOT INJECTED")


def test_a_gap_over_the_promise_is_slow() -> None:
    """One of two samples is over the 99th percentile."""
    [row] = report.rows([one(), one(gap_s=0.6)])
    assert (row.failed, row.word(), cell(row, "p99")) == (True, "SLOW", "0.60")
    [row] = report.rows([one(), one(gap_s=0.4)])
    assert (row.failed, row.word()) == (False, "ok")


@pytest.mark.parametrize(
    ("causes", "word"),
    [({"leader": 3, "resend": 1}, "ok"), ({"leader": 3, "gap": 1}, "MOVED"), ({}, "ok")],
)
def test_a_row_may_say_that_no_running_stream_moves(causes: dict[str, int], word: str) -> None:
    """What waits goes to the next leader; what runs stays."""
    still = EXPERIMENT._replace(still=True)
    [row] = report.rows([one()._replace(experiment=still, redrives=Counter(causes))])
    assert row.word() == word


def test_what_is_computed_again_is_not_in_the_promised_gap() -> None:
    """0.5 s, and 1.3 times what the lost ids take."""
    [row] = report.rows([one(gap_s=1.7)._replace(recompute_s=1.0)])
    assert row.word() == "ok"
    [row] = report.rows([one(gap_s=1.9)._replace(recompute_s=1.0)])
    assert row.word() == "SLOW"


def test_a_watcher_that_slept_believes_wrong_answers_only() -> None:
    """Both proxies stand still with this process: silence was its own, wrong text was not."""
    assert one("silent").counts
    assert not one("silent", slept_s=SLEPT_S).counts
    assert not one(slept_s=SLEPT_S).counts
    assert one("different", "silent", slept_s=SLEPT_S).counts


def test_rows_have_names_of_their_own_and_the_page_has_them_all() -> None:
    """A round is named by its row; `--fault` and seeds go by the name."""
    rows = table()
    assert len({row.name for row in rows}) == len(rows)
    page = report.document(report.rows([one()]), seed=7, engine="sim", minutes=1.0)
    assert "SEED=7" in page
    assert "| kill  | gpu_worker |" in page
    assert "{" not in page
