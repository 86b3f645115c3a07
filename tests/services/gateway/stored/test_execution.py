"""Who runs a request, decided by its log alone: conflicts, lost answers, pauses at every point."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from services.gateway.events import Delta
from services.gateway.stored.config import StoredConfig
from services.gateway.stored.events import (
    Adopted,
    CancelRequested,
    Ended,
    Opened,
    Output,
    Submitted,
    session_events,
)
from services.gateway.stored.execution import Append, Begin, Drop, Stop, Wait
from shared.errors import MeshError
from tests.services.gateway.stored.log_rig import LENGTHS, SUBMITTED, Gateway, Wire, text

CALM = 12  # appends of a calm run, at most


def check(wire: Wire, *, whole: bool) -> None:
    """One end; ids of each choice without gap or repeat (the wire's own log has seen to that); the
    text of a calm run, or the beginning of it.
    """
    events = wire.events()
    assert sum(isinstance(event, Submitted) for event in events) == 1
    assert [event for event in events if isinstance(event, Ended)] == events[-1:]
    assert sum(isinstance(event, Opened) for event in events) <= 1
    said = dict.fromkeys(LENGTHS, "")
    for event in events:
        for told in session_events(event):
            if isinstance(told, Delta):
                said[told.choice] += told.text
    for choice, length in LENGTHS.items():
        if whole:
            assert said[choice] == text(choice)
            assert wire.log.choices[choice].finish_reason == "stop"
            assert len(wire.log.choices[choice].ids) == length
        assert text(choice).startswith(said[choice])
    end = events[-1]
    assert isinstance(end, Ended)
    assert end.completion_tokens == sum(len(c.ids) for c in wire.log.choices.values())
    assert (end.code == "") == whole


def test_a_calm_run() -> None:
    """Adopted, opened, ids as they come, the end; epochs begin above its `Adopted`."""
    wire = Wire()
    gateway = Gateway("a", wire)
    assert gateway.run() == "done"
    kinds = [type(event) for event in wire.events()]
    assert kinds[:3] == [Submitted, Adopted, Opened]
    assert set(kinds[3:-1]) == {Output}
    assert len(kinds) <= CALM
    assert gateway.epochs == [wire.entries[1][0] << 20]
    assert wire.log.ended is not None
    assert (wire.log.ended.prompt_tokens, wire.log.ended.cached_tokens) == (2, 1)
    check(wire, whole=True)


def appends_until(gateway: Gateway, count: int) -> bool:
    """Go on until the append number `count` is next; False when the run is over before."""
    done = 0
    for _ in range(200):
        step = gateway.peek()
        if isinstance(step, Append):
            if done == count:
                return True
            done += 1
        if isinstance(gateway.step(), Stop):
            return False
        gateway.deliver()
        gateway.now += 0.3
    raise AssertionError("no end")


@pytest.mark.parametrize("point", range(CALM))
def test_a_cancel_at_every_point(point: int) -> None:
    """It comes between any two events: the request ends as cancelled, or had ended before."""
    wire = Wire()
    gateway = Gateway("a", wire)
    if not appends_until(gateway, point):
        return
    wire.put(CancelRequested())
    assert gateway.run() == "done"
    assert wire.log.ended is not None
    assert wire.log.ended.code == "cancelled"
    assert wire.events()[-2] == CancelRequested()
    check(wire, whole=False)


@pytest.mark.parametrize("point", range(CALM))
def test_another_takes_over_at_every_point(point: int) -> None:
    """From then on the first appends nothing, whatever it has at hand; the other ends it."""
    wire = Wire()
    first, second = Gateway("a", wire), Gateway("b", wire, seed=6)
    if not appends_until(first, point):
        return
    assert second.run() == "done"
    before = list(wire.entries)
    assert first.run() == "done", "there is nothing left to do, for anybody"
    assert wire.entries == before
    assert first.counters["stored_appends_refused"] >= 1
    check(wire, whole=True)


@pytest.mark.parametrize("point", range(CALM))
def test_a_pause_at_every_point(point: int) -> None:
    """It wakes while the other is in the middle, and finds itself replaced: its log is that of one
    gateway at a time.
    """
    wire = Wire()
    first, second = Gateway("a", wire), Gateway("b", wire, seed=6)
    if not appends_until(first, point):
        return
    assert appends_until(second, 1)
    assert first.run() == "fenced"
    assert first.counters["stored_fenced"] == 1
    assert second.run() == "done"
    check(wire, whole=True)
    if first.epochs:
        assert first.epochs[-1] < second.epochs[-1]


@pytest.mark.parametrize("fate", ["lost", "unheard", "late"])
@pytest.mark.parametrize("point", range(CALM))
def test_no_answer_at_every_point(point: int, fate: str) -> None:
    """An append whose outcome is not known is there once in the end, whether it arrived or not."""
    wire = Wire()
    gateway = Gateway("a", wire)
    if not appends_until(gateway, point):
        return
    gateway.step(fate)
    gateway.step()
    gateway.land()
    assert gateway.run() == "done"
    check(wire, whole=True)
    assert wire.log.adopter == "a"


@pytest.mark.parametrize("point", range(CALM))
def test_a_log_purged_at_every_point(point: int) -> None:
    """Nothing is appended to what is gone; begun again under the same name it is run anew."""
    for again in (False, True):
        wire = Wire()
        gateway = Gateway("a", wire)
        if not appends_until(gateway, point):
            return
        wire.purge()
        if again:
            wire.put(SUBMITTED)
        assert gateway.run() == "done"
        if again:
            check(wire, whole=True)
        else:
            assert wire.entries == []


def test_a_request_that_no_gateway_can_run_ends() -> None:
    """Adopted again and again without a single id: it, not its gateways, is at fault."""
    wire = Wire()
    for name in "abcd":
        wire.put(Adopted(gateway=name))
    gateway = Gateway("e", wire)
    assert gateway.run() == "done"
    assert gateway.epochs == []
    assert wire.log.ended is not None
    assert wire.log.ended.code == "internal"


def test_a_request_that_came_too_late_ends() -> None:
    """Its time is over before it is taken, or while it runs."""
    for point in range(6):
        wire = Wire()
        gateway = Gateway("a", wire)
        appends_until(gateway, point)
        gateway.wall = 100.0
        assert gateway.run() == "done"
        assert wire.log.ended is not None
        assert wire.log.ended.code == "deadline_exceeded"


@pytest.mark.parametrize(
    ("config", "wait_s"),
    [(StoredConfig(buffer_ids_max=3), 0.0), (StoredConfig(buffer_s=1.0), 1.1)],
)
def test_what_cannot_be_logged_is_dropped_and_generated_again(
    config: StoredConfig, wait_s: float
) -> None:
    """Too many ids, or for too long: the session goes. Once the log can be written, it is adopted
    anew by the same gateway, and goes on from what is there.
    """
    wire = Wire()
    gateway = Gateway("a", wire, config)
    assert appends_until(gateway, 3)
    gateway.step("lost")
    for _ in range(3):
        gateway.deliver()
    gateway.now += wait_s
    assert isinstance(gateway.step("lost"), Drop)
    for _ in range(5):
        gateway.step("lost")
    assert gateway.session is None
    assert gateway.run() == "done"
    check(wire, whole=True)
    drops = gateway.counters["stored_buffers_dropped"]
    assert drops >= 1
    assert sum(isinstance(event, Adopted) for event in wire.events()) == 1 + drops
    assert gateway.epochs[0] < gateway.epochs[1]


def test_the_number_of_events_is_bounded() -> None:
    """The log of an answer that never ends is paced, and ended before it is full."""
    wire = Wire()
    gateway = Gateway("a", wire, StoredConfig(events_max=64))
    while not isinstance(gateway.step(), Wait):
        pass
    for index in range(1000):
        gateway.execution.delivered(Delta(0, index, [index], "x"), gateway.now)
        while not isinstance(step := gateway.step(), Wait | Stop):
            pass
        if isinstance(step, Stop):
            break
    assert wire.log.ended is not None
    assert wire.log.ended.code == "internal"
    assert len(wire.entries) < 64


def test_after_a_burst_events_are_paced(monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes faster than the pace rides in the next event; nothing waits behind the end."""
    monkeypatch.setattr("services.gateway.stored.execution.BURST", 3)
    wire = Wire()
    gateway = Gateway("a", wire)
    while not isinstance(gateway.step(), Wait):
        pass
    gateway.now = 1.0
    gateway.execution.delivered(Delta(0, 0, [0], "x"), gateway.now)
    gateway.step()
    for index in range(1, 5):
        gateway.execution.delivered(Delta(0, index, [index], "x"), gateway.now)
        assert isinstance(gateway.step(), Wait)
    gateway.now += 0.3
    step = gateway.step()
    assert isinstance(step, Append)
    assert len(wire.log.choices[0].ids) == 5


def test_an_event_of_a_later_version_is_not_guessed_at() -> None:
    wire = Wire()
    wire.entries.append((wire.seq + 1, b"\x81\xa4type\xa5Later"))
    gateway = Gateway("a", wire)
    with pytest.raises(MeshError):
        gateway.step()


FATES = st.sampled_from(["ok", "ok", "ok", "lost", "unheard", "late"])
WHO = st.integers(0, 2)


class Schedules(RuleBasedStateMachine):
    """Gateways that are paused, woken, cut off and given the job again in any order; appends lost,
    doubled and late; perhaps a cancel. The log is that of one gateway at a time, with one end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wire = Wire()
        self.born = 0
        self.gone: list[Gateway] = []
        self.gateways = [self.bear() for _ in range(3)]

    def bear(self) -> Gateway:
        self.born += 1
        config = StoredConfig(buffer_ids_max=4)
        return Gateway(f"g{self.born}", self.wire, config, seed=self.born)

    @rule(who=WHO, fate=FATES, steps=st.integers(1, 4))
    def step(self, who: int, fate: str, steps: int) -> None:
        for _ in range(steps):
            if self.gateways[who].outcome is None:
                self.gateways[who].step(fate)

    @rule(who=WHO, ids_max=st.integers(1, 3))
    def deliver(self, who: int, ids_max: int) -> None:
        self.gateways[who].deliver(ids_max)

    @rule(who=WHO)
    def hear(self, who: int) -> None:
        self.gateways[who].hear()

    @rule(who=WHO)
    def land(self, who: int) -> None:
        self.gateways[who].land()

    @rule(who=WHO)
    def job_comes_again(self, who: int) -> None:
        """To a gateway that knows nothing; what the other has sent may still arrive."""
        self.gone.append(self.gateways[who])
        self.gateways[who] = self.bear()

    @rule(who=WHO, seconds=st.sampled_from([0.3, 6.0]))
    def wait(self, who: int, seconds: float) -> None:
        self.gateways[who].now += seconds

    @precondition(lambda self: self.wire.log.ended is None)
    @rule(chance=st.integers(0, 9))
    def cancel(self, chance: int) -> None:
        if chance == 0:
            self.wire.put(CancelRequested())

    def teardown(self) -> None:
        for gateway in [*self.gone, *self.gateways]:
            while gateway.flying:
                gateway.land()
        for gateway in self.gateways:
            if gateway.outcome is None:
                gateway.run()
        if self.wire.log.ended is None:
            assert Gateway("last", self.wire).run() == "done"
        end = self.wire.log.ended
        assert end is not None
        if end.code == "internal":
            assert self.wire.log.fruitless >= 4
        elif end.code:
            assert self.wire.log.cancel_requested
        check(self.wire, whole=not end.code)


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(max_examples=100, stateful_step_count=60, deadline=None)


def test_begin_comes_after_the_adoption_is_logged() -> None:
    """No session is opened for a request that is not ours yet."""
    wire = Wire()
    gateway = Gateway("a", wire)
    gateway.step()
    for _ in range(3):
        assert not isinstance(gateway.step("lost"), Begin)
    gateway.step()
    gateway.step()
    assert isinstance(gateway.step(), Begin)
