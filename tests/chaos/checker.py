"""Judges a history, and nothing but the history. Pure.

Each rule has a name; a violation says which request broke which rule and how. What the mesh may do
to requests that were under way when the fault came is said by `Allowed`, and is nothing by default.
"""

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.chaos.history import (
    Asked,
    AtRest,
    Ended,
    How,
    Injected,
    Line,
    Named,
    Numbered,
    Told,
    Used,
)

FOREIGN_CHARS = 16  # of a text that is wrong: if another answer has them, they came from there


class Allowed(NamedTuple):
    """How requests that were under way at the fault may end, besides well."""

    cut: bool = False
    codes: frozenset[str] = frozenset()  # of errors
    later: bool = False  # those asked after it, too
    stored: bool = False  # stored ones, too: they outlive their gateways


class Violation(NamedTuple):
    rule: str
    request: str
    detail: str


@dataclass(slots=True)
class Answer:
    """All that a client got of one request."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, tuple[float, ...]] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    used: tuple[int, int] | None = None  # prompt and completion tokens
    tokens: int | None = 0  # delivered; None = the answer does not say

    def add(self, told: Told) -> None:
        choice = told.choice
        self.texts[choice] = self.texts.get(choice, "") + told.text
        self.logprobs[choice] = self.logprobs.get(choice, ()) + told.logprobs
        if told.finish:
            self.finishes[choice] = self.finishes.get(choice, "") + told.finish
        self.tokens = (
            None if told.tokens is None or self.tokens is None else self.tokens + told.tokens
        )


@dataclass(slots=True)
class Request:
    """One request's part of a history."""

    asked: Asked
    answer: Answer = field(default_factory=Answer)
    ends: list[Ended] = field(default_factory=list)
    told_at: list[float] = field(default_factory=list)
    after_end: int = 0
    names: set[str] = field(default_factory=set)
    numbers: list[int] = field(default_factory=list)  # of events
    lasts: list[int] = field(default_factory=list)  # places of those that said it is over

    @property
    def how(self) -> How | None:
        return self.ends[0].how if self.ends else None

    def under_way(self, at: float) -> bool:
        """Whether it had begun at `at` and not ended."""
        return self.asked.at <= at and (not self.ends or self.ends[0].at >= at)


Calm = dict[str, Answer]
"""The answer of each ask in a run without faults."""


@dataclass(slots=True)
class Verdict:
    """What came of a history."""

    requests: int
    ends: Counter[str]
    gaps_s: list[float]  # of each stream under way at the fault: its longest wait from then on
    firsts_s: list[float]  # of each stream asked after the fault: from there to its first delivery
    violations: list[Violation]

    def count(self, *rules: str) -> int:
        return sum(violation.rule in rules for violation in self.violations)


def check(lines: Iterable[Line], calm: Calm, allowed: Allowed | None = None) -> Verdict:
    """All rules over one round; `allowed` is None for a round without a fault."""
    lines = list(lines)
    requests, strays = fold(lines)
    injected = next((line for line in lines if isinstance(line, Injected)), None)
    found = [Violation("stray", request, "answered, never asked") for request in strays]
    if allowed is not None and injected is None:
        found.append(Violation("not_injected", "", "the fault was never there"))
    for name, request in requests.items():
        excused = (
            allowed is not None and injected is not None and excuses(allowed, request, injected.at)
        )
        grace = allowed if excused and allowed is not None else Allowed()
        found += [Violation(rule, name, why) for rule, why in faults_of(request, calm, grace)]
    found += _name_faults(requests.values())
    rest = next((line for line in reversed(lines) if isinstance(line, AtRest)), None)
    if rest is None:
        found.append(Violation("no_rest", "", "the mesh was never seen at rest"))
    else:
        found += [Violation("leaked", "", leak) for leak in rest.leaks]
    return Verdict(
        requests=len(requests),
        ends=Counter(request.how or "lost" for request in requests.values()),
        gaps_s=[] if injected is None else gaps(requests.values(), injected.at),
        firsts_s=[] if injected is None else firsts(requests.values(), injected.at),
        violations=found,
    )


def excuses(allowed: Allowed, request: Request, at: float) -> bool:
    """Whether `request` may be hurt by a fault that came at `at`."""
    if request.asked.key and not allowed.stored:
        return False
    return request.under_way(at) or (allowed.later and request.asked.at > at)


def fold(lines: Iterable[Line]) -> tuple[dict[str, Request], set[str]]:
    """The history by request, and names that were answered but never asked."""
    requests: dict[str, Request] = {}
    strays: set[str] = set()
    for line in lines:
        if isinstance(line, Asked):
            requests[line.request] = Request(line)
        elif isinstance(line, Told | Used | Named | Numbered | Ended):
            request = requests.get(line.request)
            if request is None:
                strays.add(line.request)
            else:
                _take(request, line)
    return requests, strays


def _take(request: Request, line: Told | Used | Named | Numbered | Ended) -> None:
    if isinstance(line, Ended):
        request.ends.append(line)
        return
    request.after_end += bool(request.ends)
    match line:
        case Used():
            request.answer.used = line.prompt_tokens, line.completion_tokens
        case Told():
            request.answer.add(line)
            request.told_at.append(line.at)
        case Named():
            request.names.add(line.name)
        case Numbered():
            if line.last:
                request.lasts.append(len(request.numbers))
            request.numbers.append(line.number)


def answers(lines: Iterable[Line]) -> Calm:
    """The answer of each ask that finished; of several the first (`check` compares the rest)."""
    calm: Calm = {}
    for request in fold(lines)[0].values():
        if request.how == "finished":
            calm.setdefault(request.asked.ask, request.answer)
    return calm


def faults_of(request: Request, calm: Calm, allowed: Allowed) -> Iterable[tuple[str, str]]:
    """Every rule that one request breaks, and how."""
    if not request.ends:
        yield "lost", "never ended"
    if len(request.ends) > 1:
        yield "duplicated", f"ended {len(request.ends)} times"
    if request.after_end:
        yield "after_end", f"{request.after_end} deliveries after the end"
    yield from _text_faults(request, calm)
    yield from _number_faults(request)
    if request.ends:
        yield from _end_faults(request, request.ends[0], calm, allowed)


def _number_faults(request: Request) -> Iterable[tuple[str, str]]:
    """Events of a stored answer are 0 to n-1, each once and in order, and the last says so."""
    numbers = request.numbers
    wrong = next((place for place, number in enumerate(numbers) if number != place), None)
    if wrong is not None:
        rule = "repeated" if numbers[wrong] < wrong else "skipped"
        yield rule, f"event {numbers[wrong]} at place {wrong}"
    ends = len(numbers) - 1
    if any(place != ends for place in request.lasts):
        yield "duplicated", f"the last event at {request.lasts} of {len(numbers)}"
    if numbers and not request.lasts and request.how == "finished":
        yield "truncated", f"{len(numbers)} events, and none is the last"


def _name_faults(requests: Iterable[Request]) -> Iterable[Violation]:
    """One key, one request; another key, another request."""
    names: dict[str, set[str]] = {}
    keys: dict[str, str] = {}
    for request in requests:
        key, name = request.asked.key, request.asked.request
        known = names.setdefault(key, set())
        known |= request.names
        if len(known) > 1:
            yield Violation("two_results", name, f"{sorted(known)} under one key")
        for given in request.names:
            if keys.setdefault(given, key) != key:
                yield Violation("foreign", name, f"{given} is the request of another key")


def _end_faults(
    request: Request, end: Ended, calm: Calm, allowed: Allowed
) -> Iterable[tuple[str, str]]:
    wanted = request.asked.may_fail
    said = f"{end.code or 'no code'}: {end.detail}"
    match end.how:
        case "finished" if wanted:
            yield "unrefused", f"finished, where one of {wanted} is right"
        case "finished":
            yield from _whole_faults(request, calm)
        case "failed" if not end.code:
            yield "untyped", end.detail
        case "failed" if end.code not in wanted and end.code not in allowed.codes:
            yield "failed", said
        case "cut" if not allowed.cut:
            yield "cut", end.detail
        case "silent":
            yield "silent", end.detail


def _text_faults(request: Request, calm: Calm) -> Iterable[tuple[str, str]]:
    """What was delivered is a beginning of the calm answer, whatever the end."""
    right = calm.get(request.asked.ask)
    if right is None:
        if request.answer.texts and not request.asked.may_fail:
            yield "uncompared", f"no calm answer of {request.asked.ask}"
        return
    for choice, text in request.answer.texts.items():
        wanted = right.texts.get(choice)
        if wanted is None or not wanted.startswith(text):
            yield _compare(request.asked.ask, choice, text, calm)
        got, want = request.answer.logprobs[choice], right.logprobs.get(choice, ())
        if got != want[: len(got)]:
            yield "different", f"choice {choice}: other logprobs"


def _whole_faults(request: Request, calm: Calm) -> Iterable[tuple[str, str]]:
    """A finished answer is the calm one, to its last token, and says what it used."""
    answer, right = request.answer, calm.get(request.asked.ask)
    if right is None:
        return
    if answer.texts.keys() != right.texts.keys():
        yield "different", f"choices {sorted(answer.texts)}, not {sorted(right.texts)}"
    for choice, text in answer.texts.items():
        wanted = right.texts.get(choice, "")
        if len(text) < len(wanted) and wanted.startswith(text):
            yield "truncated", f"choice {choice}: {len(text)} of {len(wanted)} characters"
        elif len(answer.logprobs[choice]) < len(right.logprobs.get(choice, ())):
            yield "truncated", f"choice {choice}: logprobs are missing"
    if answer.finishes != right.finishes:
        yield "finish", f"{answer.finishes}, not {right.finishes}"
    if answer.used != right.used:
        yield "usage", f"{answer.used}, not {right.used}"
    if answer.used and answer.tokens is not None and answer.used[1] != answer.tokens:
        yield "usage", f"says {answer.used[1]}, delivered {answer.tokens}"


def _compare(ask: str, choice: int, text: str, calm: Calm) -> tuple[str, str]:
    """Why `text` is wrong: whose is it?"""
    wanted = calm[ask].texts.get(choice, "")
    at = next(
        (i for i, (a, b) in enumerate(zip(text, wanted, strict=False)) if a != b),
        min(len(text), len(wanted)),
    )
    where = f"choice {choice} at character {at}: {text[at : at + 40]!r}"
    sample = text[at : at + FOREIGN_CHARS]
    if len(sample) == FOREIGN_CHARS:
        for other, answer in calm.items():
            if other != ask and any(sample in theirs for theirs in answer.texts.values()):
                return "foreign", f"{where} is of {other}"
        if sample in wanted:
            kind = "repeated" if wanted.index(sample) < at else "skipped"
            return kind, where
    return "different", f"{where}, not {wanted[at : at + 40]!r}"


def gaps(requests: Iterable[Request], at: float) -> list[float]:
    """For each stream under way at `at` that finished: its longest wait that ended after it."""
    longest = []
    for request in requests:
        times = request.told_at
        streams = _streams(request) and request.how == "finished"
        if not streams or len(times) < 2 or not times[0] <= at <= times[-1]:
            continue
        longest.append(max(b - a for a, b in itertools.pairwise(times) if b > at))
    return longest


def ids_at_fault(lines: Iterable[Line], calm: Calm) -> float:
    """What a stream under way held, on average: its prompt, and at least one id per delivery."""
    lines = list(lines)
    at = next((line.at for line in lines if isinstance(line, Injected)), 0.0)
    held = [
        used[0] + sum(told_at <= at for told_at in request.told_at)
        for request in fold(lines)[0].values()
        if request.under_way(at) and (used := calm.get(request.asked.ask, Answer()).used)
    ]
    return sum(held) / max(1, len(held))


def firsts(requests: Iterable[Request], at: float) -> list[float]:
    """For each stream asked after `at`: how long its first delivery took."""
    return [
        request.told_at[0] - request.asked.at
        for request in requests
        if request.asked.at >= at and _streams(request) and request.told_at
    ]


def _streams(request: Request) -> bool:
    """Whether it is told at once what is there: a stored one is written down before."""
    return request.asked.way != "whole" and not request.asked.key
