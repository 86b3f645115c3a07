"""Each rule of the checker catches a history that breaks it, and a right history breaks none."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from tests.chaos.checker import Allowed, Answer, Calm, Verdict, answers, check
from tests.chaos.history import (
    Asked,
    AtRest,
    Ended,
    Healed,
    History,
    Injected,
    Line,
    Named,
    Numbered,
    Told,
    Used,
    read,
)

RIGHT = "the quick brown fox jumps over the lazy dog and sleeps"
THEIRS = "an entirely other answer about copper lanterns at sea"
FAULT_AT = 3.5
Edit = Callable[[list[Line]], list[Line]]


def answer(text: str) -> Answer:
    words = text.split(" ")
    return Answer({0: text}, {0: tuple(map(float, range(len(words))))}, {0: "stop"},
                  (5, len(words)), len(words))  # fmt: skip


CALM: Calm = {"ours": answer(RIGHT), "theirs": answer(THEIRS)}


def told(text: str, first: int, at: float, finish: str = "") -> Told:
    words = text.split()
    numbers = tuple(map(float, range(first, first + len(words))))
    return Told(
        at=at, request="r", choice=0, text=text, tokens=len(words), logprobs=numbers, finish=finish
    )


def right() -> list[Line]:
    """One stream through one fault, as it should be: 11 words in three deliveries."""
    return [
        Asked(at=1, request="r", ask="ours", way="stream"),
        told("the quick brown fox", 0, 2),
        Injected(at=FAULT_AT, fault="kill", target="gpu_worker", proof="pid gone"),
        told(" jumps over the lazy", 4, 4),
        Healed(at=4.5, fault="kill"),
        told(" dog and sleeps", 8, 5, "stop"),
        Used(at=5, request="r", prompt_tokens=5, completion_tokens=11),
        Ended(at=6, request="r", how="finished"),
        AtRest(at=7),
    ]


def judged(edit: Edit, allowed: Allowed | None = None) -> Verdict:
    return check(edit(right()), CALM, allowed or Allowed())


def test_a_right_history_breaks_no_rule() -> None:
    verdict = judged(lambda lines: lines)
    assert verdict.violations == []
    assert verdict.requests == 1
    assert verdict.ends == {"finished": 1}
    assert verdict.gaps_s == [2.0], "from the last delivery before the fault to the next"


def without(index: int) -> Edit:
    return lambda lines: lines[:index] + lines[index + 1 :]


def put(index: int, line: Line) -> Edit:
    return lambda lines: [*lines[:index], line, *lines[index + 1 :]]


def insert(index: int, line: Line) -> Edit:
    return lambda lines: [*lines[:index], line, *lines[index:]]


def change(index: int, **fields: object) -> Edit:
    return lambda lines: put(index, msgspec.structs.replace(lines[index], **fields))(lines)


def ended(how: str, **fields: str) -> Edit:
    """It ends so after its first delivery."""
    end = Ended(at=4, request="r", how=how, **fields)  # type: ignore[arg-type]
    return lambda lines: [*lines[:3], end, lines[-1]]


@pytest.mark.parametrize(
    ("rule", "edit"),
    [
        ("lost", without(7)),
        ("duplicated", insert(8, Ended(at=6.5, request="r", how="finished"))),
        ("after_end", insert(8, told("", 11, 6.5))),
        ("stray", insert(8, Ended(at=6, request="nobody", how="finished"))),
        ("skipped", change(3, text=" the lazy dog and sleeps")),
        ("repeated", change(3, text="the quick brown fox jumps")),
        ("foreign", change(3, text=" about copper lanterns at sea")),
        ("different", change(3, text=" leaps over the lazy")),
        ("different", change(3, logprobs=(4.0, 5.0, 9.0, 7.0))),
        ("different", change(3, choice=1)),
        ("truncated", without(3)),
        ("truncated", change(5, text=" dog")),
        ("truncated", change(5, logprobs=())),
        ("finish", change(5, finish="length")),
        ("finish", change(5, finish="")),
        ("finish", change(3, finish="stop")),
        ("usage", without(6)),
        ("usage", change(6, completion_tokens=12)),
        ("usage", change(6, prompt_tokens=4)),
        ("usage", change(5, tokens=4)),
        ("failed", ended("failed", code="unavailable")),
        ("untyped", ended("failed", code="", detail="<html>")),
        ("cut", ended("cut")),
        ("silent", ended("silent")),
        ("uncompared", change(0, ask="never asked in the calm")),
        ("unrefused", change(0, may_fail=("internal_error",))),
        ("not_injected", without(2)),
        ("leaked", change(8, leaks=("gpu_worker-0 holds 3 blocks",))),
        ("no_rest", without(8)),
    ],
)
def test_a_broken_rule_is_named(rule: str, edit: Edit) -> None:
    """The violation bears the rule's name; histories that break more are not told apart here."""
    assert rule in {violation.rule for violation in judged(edit).violations}


def stored() -> list[Line]:
    """Two clients of one key, through the death of a gateway: one stays, one comes again."""
    words = RIGHT.split(" ")
    lines: list[Line] = [Injected(at=FAULT_AT, fault="kill", target="gateway", proof="pid gone")]
    for request in ("r", "s"):
        lines += [
            Asked(at=1, request=request, ask="ours", way="kept", key="k"),
            Named(at=2, request=request, name="chatcmpl-1"),
            Numbered(at=2, request=request, number=0),
            msgspec.structs.replace(told(RIGHT, 0, 5, "stop"), request=request),
            Numbered(at=5, request=request, number=1),
            Numbered(at=5, request=request, number=2, last=True),
            Used(at=5, request=request, prompt_tokens=5, completion_tokens=len(words)),
            Ended(at=6, request=request, how="finished"),
        ]
    return [*lines, AtRest(at=7)]


def test_a_right_history_of_stored_requests_breaks_no_rule() -> None:
    verdict = check(stored(), CALM, Allowed())
    assert verdict.violations == []
    assert (verdict.gaps_s, verdict.firsts_s) == ([], []), "what is written down first is no stream"


@pytest.mark.parametrize(
    ("rule", "edit"),
    [
        ("repeated", change(5, number=0)),
        ("repeated", lambda lines: insert(6, lines[5])(lines)),
        ("skipped", change(5, number=2)),
        ("skipped", without(3)),
        ("truncated", change(6, last=False)),
        ("duplicated", change(5, last=True)),
        ("duplicated", insert(7, Numbered(at=5, request="r", number=3, last=True))),
        ("after_end", insert(9, Numbered(at=6.5, request="r", number=3))),
        ("two_results", change(2, name="chatcmpl-2")),
        ("two_results", insert(6, Named(at=5, request="r", name="chatcmpl-2"))),
        ("foreign", change(1, key="another")),
    ],
)
def test_a_broken_rule_of_stored_requests_is_named(rule: str, edit: Edit) -> None:
    """Each event once, one end, one answer to one key."""
    assert rule in {
        violation.rule for violation in check(edit(stored()), CALM, Allowed()).violations
    }


@pytest.mark.parametrize("end", [{"how": "cut"}, {"how": "failed", "code": "unavailable"}])
def test_a_stored_request_is_excused_only_where_that_is_said(end: dict[str, str]) -> None:
    """The death of its gateway is an excuse for a plain stream, not for what outlives a gateway."""
    allowed = Allowed(cut=True, codes=frozenset({"unavailable"}), later=True)
    lines = change(8, **end)(stored())
    verdict = check(lines, CALM, allowed)
    assert [(v.rule, v.request) for v in verdict.violations] == [(end["how"], "r")]
    assert check(lines, CALM, allowed._replace(stored=True)).violations == []


def test_wrong_text_counts_whatever_the_end() -> None:
    """A request that failed or was cancelled must have been right up to there."""
    for how in ("failed", "cancelled", "cut", "silent"):
        verdict = judged(lambda lines, how=how: ended(how)(change(1, text="the slow")(lines)))
        assert verdict.count("different") == 1, how


@pytest.mark.parametrize(
    ("edit", "allowed"),
    [
        (ended("cancelled"), Allowed()),
        (ended("cut"), Allowed(cut=True)),
        (ended("failed", code="unavailable"), Allowed(codes=frozenset({"unavailable"}))),
    ],
)
def test_what_is_allowed_is_no_violation(edit: Edit, allowed: Allowed) -> None:
    assert judged(edit, allowed).violations == []


@pytest.mark.parametrize(
    ("edit", "rule"),
    [(ended("cut"), "cut"), (ended("failed", code="unavailable"), "failed")],
)
def test_what_is_allowed_is_so_for_requests_under_way_only(edit: Edit, rule: str) -> None:
    """A request asked after the fault has no excuse."""
    allowed = Allowed(cut=True, codes=frozenset({"unavailable"}))
    verdict = judged(lambda lines: change(0, at=FAULT_AT + 0.1)(edit(lines)), allowed)
    assert [violation.rule for violation in verdict.violations] == [rule]
    later = judged(
        lambda lines: change(0, at=FAULT_AT + 0.1)(edit(lines)), allowed._replace(later=True)
    )
    assert later.violations == [], "unless that is said"


def test_a_request_that_is_to_fail_may_do_so_in_its_own_way_only() -> None:
    for code, rules in (("internal_error", []), ("unavailable", ["failed"])):
        verdict = judged(
            lambda lines, code=code: [
                Asked(at=1, request="r", ask="poison", way="stream", may_fail=("internal_error",)),
                lines[2],
                Ended(at=6, request="r", how="failed", code=code),
                AtRest(at=7),
            ]
        )
        assert [violation.rule for violation in verdict.violations] == rules


def test_a_wait_is_measured_from_the_delivery_before_the_fault_to_the_end_of_the_stream() -> None:
    """A long wait that was over before the fault is not the fault's; a stream that had ended, had
    not begun, or is a whole answer gives no sample.
    """
    lines = right()
    assert judged(lambda _: change(0, way="whole")(lines)).gaps_s == []
    assert judged(lambda _: change(1, at=3.6)(lines)).gaps_s == []
    assert judged(lambda _: change(2, at=5.5)(lines)).gaps_s == []
    assert judged(lambda _: change(2, at=4.4)(lines)).gaps_s == [1.0]


def test_a_first_delivery_is_timed_for_streams_asked_after_the_fault() -> None:
    """New work, when a leader has died."""
    lines = right()
    assert judged(lambda _: lines).firsts_s == []
    later = change(1, at=3.75)(change(0, at=FAULT_AT)(lines))
    assert judged(lambda _: later).firsts_s == [0.25]
    assert judged(lambda _: change(0, way="whole", at=FAULT_AT)(lines)).firsts_s == []


def test_a_calm_run_is_compared_with_itself() -> None:
    """Two requests of one ask that differ without any fault are a violation of the second."""
    calm = [line for line in right() if not isinstance(line, Injected)]
    again = [
        msgspec.structs.replace(line, request="again")
        for line in change(2, text=" jumps over two lazy")(calm)
        if not isinstance(line, Healed | AtRest)
    ]
    assert answers(calm) == {"ours": CALM["ours"]}
    verdict = check([*calm, *again], answers([*calm, *again]))
    assert [(v.rule, v.request) for v in verdict.violations] == [("different", "again")]


def test_a_history_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    """JSON lines, appended in order, stamped unless they say when."""
    with History(tmp_path / "history.jsonl") as history:
        for line in right():
            history.add(line)
        history.add(Ended(request="r", how="cut"))
    assert read(history.path)[:-1] == right()
    assert read(history.path) == history.lines
    assert history.lines[-1].at > 0
