"""A session delivers each id once, whatever happens to everything behind it."""

import pytest

from services.gateway.events import Delta, Opening, SessionEnd
from services.gateway.opening import choice_seed
from services.gateway.sessions import Limits
from shared.ids import pack_ids
from shared.messages import (
    Cancel,
    Died,
    Generate,
    Lost,
    RouteLost,
    Submit,
)
from tests.services.gateway.session_rig import R, Rig


@pytest.fixture
def rig() -> Rig:
    return Rig()


# --- opening ---


def test_a_request_runs_from_prompt_to_end(rig: Rig) -> None:
    """Its opening, ids, one finish, one end; and then nothing is kept."""
    rig.open()
    [(tokenizer, generate)] = rig.sent(Generate)
    assert (tokenizer, generate.ids) == ("t0", [pack_ids([7, 8])])
    rig.tokenize()
    [(scheduler, submit)] = rig.sent(Submit)
    assert (scheduler, submit.epoch, submit.sampling.max_tokens) == ("s", 1, 10)
    rig.start()
    rig.text(1, 0, [1])
    rig.text(1, 1, [2], "stop")
    assert isinstance(rig.events[0], Opening)
    assert rig.ids() == [1, 2]
    assert rig.end() == SessionEnd(None, 2, 2, 0)
    assert (rig.table.num_sessions, rig.table.num_legs, rig.table.num_open) == (0, 0, 0)
    assert rig.sent(Cancel) == []


def test_choices_are_legs_of_their_prompt_with_seeds_of_their_own(rig: Rig) -> None:
    """choice = prompt number x n + j; no max_tokens fills the context."""
    rig.open(ids=[[1], [2, 3]], n=2, max_tokens=None)
    rig.tokenize([[1], [2, 3]])
    submits = [submit for _, submit in rig.sent(Submit)]
    assert [s.choice for s in submits] == [0, 1, 2, 3]
    assert [s.sampling.max_tokens for s in submits] == [99, 99, 98, 98]
    assert [s.sampling.seed for s in submits] == [choice_seed(5, c) for c in range(4)]
    assert len({s.sampling.seed for s in submits}) == 4


def test_what_does_not_fit_the_context_is_the_clients_error(rig: Rig) -> None:
    """The numbers are in the sentence, so that a client can shorten the right thing."""
    rig.open(max_tokens=99)
    rig.tokenize()
    error = rig.end().error
    assert error is not None
    assert error.code == "context_length_exceeded"
    assert error.detail == (
        "This model's maximum context length is 100 tokens. However, you requested 101 tokens "
        "(2 in the prompt, 99 in the completion). "
        "Please reduce the length of the prompt or completion."
    )


def test_no_tokens_wanted_is_an_answer_too(rig: Rig) -> None:
    """max_tokens 0 needs no worker."""
    rig.open(max_tokens=0)
    rig.tokenize()
    assert rig.sent(Submit) == []
    assert rig.end().error is None
    assert [e.finish_reason for e in rig.events if isinstance(e, Delta)] == ["length"]


def test_a_full_gateway_refuses_with_advice() -> None:
    """Sessions are bounded, and the one refused has its end."""
    rig = Rig(Limits(sessions=1))
    rig.open()
    rig.open(request_id="x" * 32)
    error = rig.end().error
    assert error is not None
    assert (error.code, error.retry_after_s) == ("overloaded", 1.0)
    assert rig.table.num_sessions == 1


def test_a_silent_tokenizer_is_followed_by_the_next_and_three_are_enough(rig: Rig) -> None:
    """The second try goes elsewhere; after the third the request is unavailable."""
    rig.open()
    rig.pass_time(6.0)
    assert [tokenizer for tokenizer, _ in rig.sent(Generate)] == ["t0", "t1", "t0"]
    assert not rig.events  # it beats, so it is busy: waited for ever longer
    rig.pass_time(0.5)
    assert rig.error_code() == "unavailable"


def test_a_dead_tokenizer_is_not_waited_for(rig: Rig) -> None:
    """`Died` moves the question at the next tick."""
    rig.open()
    rig.sent()
    rig.say(Died(instance="t0", reason="killed"))
    rig.table.tick(rig.now + 0.05)
    assert [tokenizer for tokenizer, _ in rig.sent(Generate)] == ["t1"]


def test_a_tokenizer_that_fell_silent_is_not_waited_for(rig: Rig) -> None:
    """Patience is for one that beats."""
    rig.open()
    rig.pass_time(0.5)
    assert [tokenizer for tokenizer, _ in rig.sent(Generate)] == ["t0", "t1"]
    rig.pass_time(1.1, beating=("t0",))
    assert [tokenizer for tokenizer, _ in rig.sent(Generate)] == ["t0"]


def test_a_crowd_is_not_asked_about_again_and_again(rig: Rig) -> None:
    """Who stands behind many waits longer: asking again would make a busy tokenizer busier."""
    for number in range(100):
        rig.open(request_id=f"{number:032x}")
    assert len(rig.sent(Generate)) == 100
    rig.pass_time(0.35)
    assert len(rig.sent(Generate)) < 25


def test_tries_made_while_cut_off_do_not_count(rig: Rig) -> None:
    """An outage of our own is not the tokenizers' silence; the question is asked again after it."""
    rig.open()
    rig.table.connection_lost(rig.now)
    rig.pass_time(5.0)
    rig.table.reconnected(rig.now)
    rig.pass_time(0.1)
    assert len(rig.sent(Generate)) == 2
    rig.tokenize()
    assert len(rig.sent(Submit)) == 1


# --- exactly once ---


def test_repeats_and_lower_epochs_are_dropped(rig: Rig) -> None:
    """Neither a duplicate on the bus nor a worker that woke up late reaches the client."""
    rig.running()
    rig.text(1, 0, [1, 2])
    rig.text(1, 1, [2])
    rig.say(RouteLost(request_id=R, choice=0, epoch=1, reason="gap"))
    assert rig.resubmitted().epoch == 2
    rig.text(1, 2, [99], "stop")
    rig.text(2, 2, [3], "stop")
    assert rig.ids() == [1, 2, 3]
    assert rig.end().error is None


def test_a_gap_drives_the_leg_again_from_what_was_delivered(rig: Rig) -> None:
    """The Submit carries the delivered ids apart from the prompt, and who ran the leg last."""
    rig.running()
    rig.text(1, 3, [4])
    submit = rig.resubmitted()
    assert (submit.epoch, submit.last_worker) == (2, "w0")
    assert (submit.prompt_ids, submit.output_ids) == (pack_ids([7, 8]), pack_ids([1, 2]))
    assert rig.ids() == [1, 2]


def test_delivered_ids_that_end_the_leg_need_no_redrive(rig: Rig) -> None:
    """All ids are there, so the finish is known without asking anybody."""
    rig.open(max_tokens=2)
    rig.tokenize()
    rig.start()
    rig.text(1, 0, [1, 2])
    rig.sent()
    rig.say(Lost(instance="w0", scheduler="s", term=1))
    rig.pass_time(0.2)
    assert rig.sent(Submit) == []
    assert rig.end().error is None


# --- ends ---


def test_the_deadline_of_the_session_binds_and_cancels(rig: Rig) -> None:
    """Wherever the request is by then, also while cut off."""
    rig.open(timeout_s=2.0)
    rig.tokenize()
    rig.start()
    rig.table.connection_lost(rig.now)
    rig.pass_time(2.1)
    assert rig.error_code() == "deadline_exceeded"
    assert {to for to, _ in rig.sent(Cancel)} == {"s", "w0"}


def test_a_client_that_leaves_cancels_everywhere_once(rig: Rig) -> None:
    """Cancelling twice, or what has ended, does nothing."""
    rig.running()
    rig.table.cancel(R, "disconnected", rig.now)
    assert rig.error_code() == "cancelled"
    assert {to for to, _ in rig.sent(Cancel)} == {"s", "w0"}
    count = len(rig.events)
    rig.table.cancel(R, "disconnected", rig.now)
    rig.text(1, 2, [3])
    assert len(rig.events) == count
