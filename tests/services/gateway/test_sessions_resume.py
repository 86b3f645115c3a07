"""A session that another gateway began: it goes on from what was delivered, and draws nothing."""

from typing import Any

import pytest
from msgspec.structs import replace

from services.gateway.events import Delta, Opening, Resume
from shared.ids import unpack_ids
from shared.messages import Generate, Submit
from tests.services.gateway.session_rig import Rig

SPEC: dict[str, Any] = {"ids": [[7, 8], [9]], "n": 2, "max_tokens": 4, "seed": None}


@pytest.fixture
def began() -> Opening:
    """What the first gateway fixed; its seed was drawn."""
    rig = Rig()
    rig.open(**SPEC)
    rig.tokenize([[7, 8], [9]])
    [opening] = [event for event in rig.events if isinstance(event, Opening)]
    return opening


def test_a_resumed_session_submits_what_the_first_one_would(began: Opening) -> None:
    """Same prompts and parameters, drawn seeds included; ids delivered, epochs above the given one;
    a choice that has finished is not submitted, no tokenizer is asked.
    """
    first, second = Rig(), Rig()
    first.open(**SPEC | {"seed": began.seed})
    first.tokenize([[7, 8], [9]])
    calm = {submit.choice: submit for _, submit in first.sent(Submit)}

    resume = Resume(
        epoch=5 << 20, opening=began, output_ids={0: [1, 2, 3], 2: [4]}, ended=frozenset({2})
    )
    second.open(**SPEC, resume=resume)
    sent = [message for _, message in second.sent()]
    assert not [message for message in sent if isinstance(message, Generate)]
    submits = {message.choice: message for message in sent if isinstance(message, Submit)}
    assert sorted(submits) == [0, 1, 3]
    for choice, submit in submits.items():
        assert submit.sampling == calm[choice].sampling
        assert submit.prompt_ids == calm[choice].prompt_ids
        assert submit.block_hashes == calm[choice].block_hashes
        assert submit.epoch == (5 << 20) + 1
    assert unpack_ids(submits[0].output_ids) == [1, 2, 3]
    assert submits[1].output_ids == b""
    assert second.events == [], "it was opened before"


def test_a_resumed_session_ends_with_all_its_ids_counted(began: Opening) -> None:
    """What an earlier gateway delivered is not delivered again, and counts as used."""
    one = replace(began.tokenized, prompts=began.tokenized.prompts[:1])
    opening = replace(began, tokenized=one)
    rig = Rig()
    rig.open(
        **SPEC | {"ids": [[7, 8]], "n": 1},
        resume=Resume(epoch=1 << 20, opening=opening, output_ids={0: [1, 2, 3]}),
    )
    [(_, submit)] = rig.sent(Submit)
    rig.start(submit.epoch)
    rig.text(submit.epoch, 3, [4], "length")
    assert [(e.index, e.ids) for e in rig.events if isinstance(e, Delta)] == [(3, [4])]
    assert (rig.end().error, rig.end().completion_tokens) == (None, 4)


@pytest.mark.parametrize("ended", [frozenset({0, 1, 2, 3}), frozenset({1, 2, 3})])
def test_a_session_that_had_all_its_ids_ends_at_once(began: Opening, ended: frozenset[int]) -> None:
    """Only its end was missing, or the finish that its ids imply: nothing is submitted."""
    rig = Rig()
    full = {choice: [1, 2, 3, 4] for choice in range(4)}
    rig.open(**SPEC, resume=Resume(epoch=1, opening=began, output_ids=full, ended=ended))
    assert rig.sent() == []
    assert rig.end().error is None
    finishes = [event.choice for event in rig.events if isinstance(event, Delta)]
    assert finishes == [choice for choice in range(4) if choice not in ended]
    assert rig.table.num_sessions == rig.table.num_legs == rig.table.num_open == 0


def test_a_session_that_never_opened_asks_a_tokenizer(began: Opening) -> None:
    """Adopted before anything was fixed: it opens here, with epochs above the given one."""
    rig = Rig()
    rig.open(**SPEC, resume=Resume(epoch=3 << 20))
    assert len(rig.sent(Generate)) == 1
    rig.tokenize([[7, 8], [9]])
    assert {submit.epoch for _, submit in rig.sent(Submit)} == {(3 << 20) + 1}
    assert isinstance(rig.events[0], Opening)
