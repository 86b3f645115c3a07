"""The small parts of the edge: feed, calls, keys, view."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.auth import Keys, bearer
from services.gateway.calls import PATIENCE_S, TRIES_MAX, Calls
from services.gateway.config import GatewayConfig
from services.gateway.events import Delta, Opening, SessionEnd
from services.gateway.feed import Feed, merge
from services.gateway.meters import Meter
from services.gateway.view import MeshView
from shared.config import ConfigError
from shared.config import settings as settings_of
from shared.core import Outbox
from shared.errors import InvalidRequest, Overloaded, Unauthorized, Unavailable
from shared.messages import (
    Beacon,
    Beat,
    Detokenize,
    Detokenized,
    Died,
    Failed,
    Tokenized,
    TokenText,
)
from shared.metrics import REGISTRY

END = SessionEnd(None, 1, 1, 0)


def delta(choice: int, index: int, text: str, logprobs: bool = False) -> Delta:
    token = TokenText(-1.0, text, text.encode())
    return Delta(choice, index, [index], text, logprobs=[token] if logprobs else None)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.text(max_size=3)), max_size=60),
    st.booleans(),
)
def test_merging_changes_nothing_but_the_number(said: list[tuple[int, str]], logs: bool) -> None:
    """Merged deltas have the same ids, text and logprobs per choice, in order, before the end."""
    events: list[Any] = [delta(choice, at, text, logs) for at, (choice, text) in enumerate(said)]
    merged = merge([*events, END])

    assert merged[-1] is END
    assert len(merged) == len({choice for choice, _ in said}) + 1
    for choice in range(4):
        before = [event for event in events if event.choice == choice]
        after = [event for event in merged[:-1] if event.choice == choice]
        assert [i for e in after for i in e.ids] == [i for e in before for i in e.ids]
        assert "".join(e.text for e in after) == "".join(e.text for e in before)
        if before:
            (one,) = after
            assert one.index == before[0].index
            assert (one.logprobs or []) == [t for e in before for t in e.logprobs or []]


async def test_a_lagging_reader_gets_few_events() -> None:
    """The number of waiting events is bounded by merging, and nothing of them is lost."""
    feed = Feed(ids_max=100_000)
    told = Tokenized(request_id="r", attempt=1, tokenizer="t", prompts=[])
    feed.emit(Opening(tokenized=told, seed=0, max_model_len=1))
    for index in range(10_000):
        feed.emit(delta(index % 2, index, "x"))
    feed.emit(END)
    events = await feed.take(1.0)

    assert len(events) < 600
    assert events[-1] is END
    assert sum(len(event.text) for event in events if isinstance(event, Delta)) == 10_000
    assert await feed.take(0.0) == []


async def test_a_reader_too_far_behind_is_told() -> None:
    """Over `ids_max` waiting ids reading is refused; ids that were read do not count."""
    feed = Feed(ids_max=3)
    for index in range(30):
        feed.emit(delta(0, index, "x"))
        assert len(await feed.take(1.0)) == 1
    for index in range(4):
        feed.emit(delta(0, index, "x"))
    feed.emit(END)
    with pytest.raises(Overloaded):
        await feed.take(1.0)


class Asked:
    """Calls with one tokenizer, and what was answered."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.tokenizer = "a"
        self.calls = Calls(self.outbox, lambda: self.tokenizer, limit=1)
        self.answers: list[Any] = []
        question = Detokenize(request_id="r", attempt=0, gateway="g", ids=b"")
        self.calls.ask(question, self.answers.append, 0.0)

    def sent(self) -> list[tuple[str, int]]:
        return [
            (subject, message.attempt)
            for subject, message in self.outbox.take()
            if isinstance(message, Detokenize)
        ]


def test_a_call_is_answered_once() -> None:
    """The first answer counts; a second, and one about another request, are not ours."""
    asked = Asked()
    answer = Detokenized(request_id="r", attempt=1, tokenizer="a", text="x")

    assert asked.sent() == [("mesh.v1.in.a", 1)]
    assert asked.calls.receive(answer)
    assert not asked.calls.receive(answer)
    assert asked.answers == [answer]
    assert len(asked.calls) == 0


def test_too_many_calls_are_refused() -> None:
    """Over the limit a question is answered at once, and those open go on."""
    asked = Asked()
    other = Detokenize(request_id="s", attempt=0, gateway="g", ids=b"")
    asked.calls.ask(other, asked.answers.append, 0.0)

    assert isinstance(asked.answers[0], Overloaded)
    assert asked.calls.receive(Detokenized(request_id="r", attempt=1, tokenizer="a", text="x"))


def test_a_call_that_fails_is_an_error() -> None:
    """`Failed` of the tokenizer is the typed error."""
    asked = Asked()
    failed = Failed(request_id="r", choice=-1, epoch=1, code="invalid_request", detail="no")

    assert asked.calls.receive(failed)
    assert isinstance(asked.answers[0], InvalidRequest)


def test_a_silent_tokenizer_is_given_up() -> None:
    """An unanswered call is asked again, of whoever is chosen then, and ends at last."""
    asked = Asked()
    asked.tokenizer = "b"
    now = 0.0
    asked.calls.tick(now)
    assert asked.sent() == [("mesh.v1.in.a", 1)]
    for attempt in range(2, TRIES_MAX + 1):
        now += 10 * PATIENCE_S
        asked.calls.tick(now)
        assert asked.sent() == [("mesh.v1.in.b", attempt)]
    asked.calls.restart(now + 10.0)
    asked.calls.tick(now + 10.0)
    assert asked.answers == []
    asked.calls.tick(now + 20.0)
    assert isinstance(asked.answers[0], Unavailable)
    assert len(asked.calls) == 0


def test_keys() -> None:
    """A known key is its tenant; none and an unknown one are refused; no keys is open."""
    keys = Keys({"a": "alice", "b": "bob"})

    assert [keys.tenant("a"), keys.tenant("b")] == ["alice", "bob"]
    for bad in (None, "", "c", "\udcff"):
        with pytest.raises(Unauthorized):
            keys.tenant(bad)
    assert Keys({}).tenant(None) == ""


def test_a_tenant_shares_prefixes_if_its_keys_say_so() -> None:
    """Nobody does unasked; keys of one tenant that differ are refused at the start, and named."""
    sharing = {"tenant": "carol", "shared_prefix": True}
    raw: dict[str, Any] = {"a": "alice", "b": {"tenant": "bob"}, "c": sharing, "c2": sharing}
    keys = Keys(settings_of({"api_keys": raw}, GatewayConfig, "gateway").api_keys)
    assert [keys.tenant(key) for key in ("a", "b", "c2")] == ["alice", "bob", "carol"]
    told = {name: keys.shares_prefixes(name) for name in ("alice", "bob", "carol", "")}
    assert told == {"alice": False, "bob": False, "carol": True, "": False}
    for other in ("carol", {"tenant": "carol"}):
        with pytest.raises(ConfigError, match=r"api_keys of 'carol' .* shared_prefix"):
            settings_of({"api_keys": {**raw, "d": other}}, GatewayConfig, "gateway")
    with pytest.raises(ConfigError, match="shared_prefixes"):
        settings_of(
            {"api_keys": {"a": {"tenant": "a", "shared_prefixes": True}}}, GatewayConfig, "gateway"
        )


@pytest.mark.parametrize(
    ("header", "key"),
    [("Bearer x", "x"), ("bearer  x ", "x"), ("Basic x", None), ("", None), (None, None)],
)
def test_bearer(header: str | None, key: str | None) -> None:
    """Only a bearer token is a key."""
    assert bearer(header) == key


def worker(name: str, load: int) -> Beat:
    return Beat(
        instance=name,
        role="gpu_worker",
        seq=1,
        load=load,
        waiting=1,
        total_blocks=10,
        free_blocks=4,
        engine_seconds={"attention": float(load)} if load else {},
        engine_counts={"preemptions": load} if load else {},
    )


def test_the_view_is_of_those_alive() -> None:
    """Sums over workers that beat; the dead and the silent do not count, nor an old leader."""
    view = MeshView()
    view.receive(worker("a", 2), 0.0)
    view.receive(worker("b", 3), 0.9)
    view.receive(Beacon(scheduler="s", term=2, pool="p", queued=5), 0.9)
    view.receive(Beacon(scheduler="t", term=1, pool="p", queued=50), 0.9)
    assert view.led
    assert (view.running, view.waiting, view.workers) == (5, 7, 2)
    assert (view.blocks_free, view.blocks_total) == (8, 20)
    view.receive(worker("b", 0), 0.95)  # a beat without
    assert view.engine_seconds == {"a": {"attention": 2.0}, "b": {"attention": 3.0}}
    assert view.engine_counts == {"a": {"preemptions": 2}, "b": {"preemptions": 3}}
    view.receive(worker("b", 3), 0.95)
    view.tick(1.1)
    assert view.running == 3
    view.receive(Died(instance="b", reason="killed"), 1.1)
    assert (view.running, view.waiting, view.blocks_total) == (0, 5, 0)
    assert not view.engine_seconds
    assert not view.engine_counts
    view.tick(1.95)
    assert not view.led
    assert view.waiting == 0, "a queue goes with its leader"


def test_engine_seconds_are_shown_as_workers_tell_them() -> None:
    """They grow with what each worker says, and are gone with it."""

    def shown(worker: str, phase: str) -> float | None:
        labels = {"worker": worker, "phase": phase}
        return REGISTRY.get_sample_value("shoal:engine_phase_seconds_total", labels)

    meter = Meter("m", "gateway-9")
    meter.engines({"w-8": {"idle": 2.0, "loop": 0.5}, "w-9": {"idle": 1.0}}, {})
    meter.engines({"w-8": {"idle": 2.5, "loop": 0.5}, "w-9": {"idle": 1.0}}, {})
    assert [shown("w-8", "idle"), shown("w-8", "loop"), shown("w-9", "idle")] == [2.5, 0.5, 1.0]
    meter.engines({"w-9": {"idle": 1.5}}, {})
    assert [shown("w-8", "idle"), shown("w-8", "loop"), shown("w-9", "idle")] == [None, None, 1.5]


def test_counts_of_engines_are_shown_under_the_names_of_vllm() -> None:
    """Hits by tier, queries and preemptions of each worker; what one does not count is 0."""

    def shown(name: str, worker: str, **labels: str) -> float | None:
        labels |= {"model_name": "m-8", "worker": worker}
        return REGISTRY.get_sample_value(name, labels)

    meter = Meter("m-8", "gateway-8")
    meter.engines({}, {"a": {"queried_tokens": 100, "l1_hit_tokens": 32}, "b": {}})
    told = {"queried_tokens": 150, "l1_hit_tokens": 48, "l2_hit_tokens": 16, "preemptions": 2}
    meter.engines({}, {"a": told, "b": {}})
    assert shown("vllm:prefix_cache_queries_total", "a") == 150
    assert shown("vllm:prefix_cache_hits_total", "a") == 48
    assert shown("vllm:num_preemptions_total", "a") == 2
    assert shown("shoal:prefix_cache_hits_total", "a", tier="l1") == 48
    assert shown("shoal:prefix_cache_hits_total", "a", tier="l2") == 16
    assert shown("vllm:prefix_cache_queries_total", "b") == 0
    meter.engines({}, {"b": {}})
    assert shown("vllm:prefix_cache_queries_total", "a") is None
