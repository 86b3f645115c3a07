"""Log probabilities of prompts on their way through a detokenizer."""

from services.detokenizer.legs import WIRE_MAX, DetokenizerLegs
from shared.ids import pack_ids
from shared.messages import (
    Failed,
    Message,
    PromptLogprobs,
    PromptToken,
    StepDone,
    StepRecord,
    TextContext,
    TextDelta,
    TextRecord,
    TokenLogprobs,
)
from shared.model_files import Vocabulary
from shared.sampling import TextParams
from shared.subjects import inbox

LONG = b"x" * 4096
VOCABULARY = Vocabulary([b"a", b"b", b"\xe2", LONG])
CONTEXT = TextContext(b"", b"", TextParams())


def prompt(ids: list[int], top: list[int]) -> PromptLogprobs:
    """Each id but the first at rank 2, with `top` as the best of its position."""
    entry = TokenLogprobs(-0.5, pack_ids(top), tuple(-1.0 - n for n in range(len(top))))
    return PromptLogprobs(pack_ids(ids), [entry] * (len(ids) - 1), [2] * (len(ids) - 1))


def record(
    name: str, index: int, ids: list[int], told: PromptLogprobs | None = None, epoch: int = 1
) -> StepRecord:
    context = None if index else CONTEXT
    return StepRecord(
        name, 0, epoch, "gw", index, pack_ids(ids), context=context, prompt_logprobs=told
    )


def step(legs: DetokenizerLegs, *records: StepRecord) -> list[Message]:
    legs.receive(StepDone(worker="w", step=1, records=list(records)), 0.0)
    sent = legs.outbox.take()
    assert {subject for subject, _ in sent} <= {inbox("gw")}
    return [message for _, message in sent]


def texts(messages: list[Message]) -> list[TextRecord]:
    return [text for each in messages if isinstance(each, TextDelta) for text in each.records]


def test_a_prompt_is_shown_token_by_token() -> None:
    """The first id alone; the others with logprob, rank and alternatives, bytes as they are."""
    [text] = texts(step(DetokenizerLegs("d", VOCABULARY), record("r", 0, [0], prompt([0, 2], [1]))))
    assert text.prompt_logprobs == [
        PromptToken(0, "a", b"a"),
        PromptToken(2, "\ufffd", b"\xe2", -0.5, 2, [(1, "b", b"b", -1.0)]),
    ]


def test_a_prompt_of_one_id_has_no_logprob_at_all() -> None:
    [text] = texts(step(DetokenizerLegs("d", VOCABULARY), record("r", 0, [0], prompt([1], []))))
    assert text.prompt_logprobs == [PromptToken(1, "b", b"b")]


def test_it_goes_with_index_0_of_each_epoch_and_no_other() -> None:
    """A re-send from the start brings it again, what is sent later does not."""
    legs = DetokenizerLegs("d", VOCABULARY)
    told = prompt([0, 1], [])
    sent = [
        *step(legs, record("r", 0, [0], told)),
        *step(legs, record("r", 0, [0, 1], told)),  # half known: only the rest is new
        *step(legs, record("r", 0, [0, 1], told, epoch=2)),
    ]
    assert [(t.epoch, t.index, t.prompt_logprobs is not None) for t in texts(sent)] == [
        (1, 0, True),
        (1, 1, False),
        (2, 0, True),
    ]


def test_each_goes_in_a_message_of_its_own() -> None:
    """Several in one step could be over the bus's limit together; other legs share one."""
    told = prompt([0, 1], [])
    sent = step(
        DetokenizerLegs("d", VOCABULARY),
        record("r1", 0, [0], told),
        record("r2", 0, [0]),
        record("r3", 0, [0], told),
        record("r4", 0, [0]),
    )
    names = [[t.request_id for t in each.records] for each in sent if isinstance(each, TextDelta)]
    assert sorted(names) == [["r1"], ["r2", "r4"], ["r3"]]


def test_what_the_bus_would_not_take_fails_by_name() -> None:
    """Tokens far longer than usual; the field is named, the leg forgotten, others go on."""
    legs = DetokenizerLegs("d", VOCABULARY)
    count = WIRE_MAX // (2 * len(LONG)) + 1
    sent = step(legs, record("r", 0, [0], prompt([3] * count, [])), record("s", 0, [0]))

    [failed] = [each for each in sent if isinstance(each, Failed)]
    assert (failed.code, failed.param, failed.retryable) == (
        "invalid_request",
        "prompt_logprobs",
        False,
    )
    assert [text.request_id for text in texts(sent)] == ["s"]
    assert legs.num_legs == 1
    assert legs.counters["refused_invalid_request"] == 1
    assert step(legs, record("r", 1, [0])) == [], "its late records are nothing"
