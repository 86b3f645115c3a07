"""Legs of a detokenizer: what is started, taken up, cut, dropped, reported and forgotten."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.config import Config
from services.detokenizer.legs import DetokenizerLegs
from shared.ids import pack_ids, unpack_ids
from shared.messages import (
    Cancel,
    End,
    Failed,
    Message,
    RouteLost,
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

VOCABULARY = Vocabulary([bytes([value]) for value in range(256)], special={0}, end_ids={0})
EOS = 0


def context(output: bytes = b"", tail: bytes = b"", **text: object) -> TextContext:
    params = TextParams(**text)  # type: ignore[arg-type]
    return TextContext(pack_ids([*tail]), pack_ids([*output]), params)


def record(
    index: int,
    ids: bytes,
    context: TextContext | None = None,
    *,
    epoch: int = 1,
    end: End = "",
    request_id: str = "r",
    gateway: str = "gw",
    logprobs: list[TokenLogprobs] | None = None,
) -> StepRecord:
    return StepRecord(
        request_id=request_id,
        choice=0,
        epoch=epoch,
        gateway=gateway,
        index=index,
        ids=pack_ids([*ids]),
        end=end,
        logprobs=logprobs,
        context=context,
    )


class Bench:
    """A detokenizer, fed by hand."""

    def __init__(self, **config: object) -> None:
        self.legs = DetokenizerLegs("detok-1", VOCABULARY, Config(**config))  # type: ignore[arg-type]

    def step(self, *records: StepRecord, now: float = 0.0) -> list[tuple[str, Message]]:
        self.legs.receive(StepDone(worker="w1", step=1, records=list(records)), now)
        return [(subject, message) for subject, message in self.legs.outbox.take()]

    def one(self, wanted: StepRecord, now: float = 0.0) -> TextRecord:
        """The only text record that `wanted` gives."""
        [(subject, message)] = self.step(wanted, now=now)
        assert subject == inbox(wanted.gateway)
        assert isinstance(message, TextDelta)
        [text] = message.records
        return text


def test_one_delta_per_gateway_and_step() -> None:
    """All legs of a gateway ride in one message, in the order of the step."""
    sent = Bench().step(
        record(0, b"a", context(), request_id="r1", gateway="gw1"),
        record(0, b"b", context(), request_id="r2", gateway="gw2"),
        record(0, b"c", context(), request_id="r3", gateway="gw1"),
    )
    assert [subject for subject, _ in sent] == [inbox("gw1"), inbox("gw2")]
    first = sent[0][1]
    assert isinstance(first, TextDelta)
    assert [(r.request_id, r.text) for r in first.records] == [("r1", "a"), ("r3", "c")]


def test_every_id_is_reported_at_once_even_if_its_text_is_held() -> None:
    bench = Bench()
    held = bench.one(record(0, b"xa", context(stop=("ab",))))
    assert (held.index, unpack_ids(held.ids), held.text) == (0, [*b"xa"], "x")
    freed = bench.one(record(2, b"c"))
    assert (freed.index, unpack_ids(freed.ids), freed.text) == (2, [*b"c"], "ac")


def test_handing_over_sends_every_leg_elsewhere_at_its_next_record() -> None:
    """Legs in hand and new ones alike, each told once; what is late of them stays unanswered."""
    bench = Bench()
    bench.one(record(0, b"a", context(), request_id="r1"))
    bench.legs.hand_over()
    sent = bench.step(
        record(1, b"b", request_id="r1"), record(0, b"c", context(), request_id="r2", gateway="gw2")
    )
    assert [(to, type(lost), lost.request_id, lost.reason) for to, lost in sent] == [  # type: ignore[attr-defined]
        (inbox("gw"), RouteLost, "r1", "drain"),
        (inbox("gw2"), RouteLost, "r2", "drain"),
    ]
    assert bench.step(record(2, b"d", request_id="r1")) == []
    assert bench.legs.num_legs == 0


def test_stop_string_cuts_and_cancels() -> None:
    """Ids after the finishing one are cut, and the worker is told to stop."""
    bench = Bench()
    logprobs = [TokenLogprobs(-1.0 * n) for n in range(5)]
    sent = bench.step(record(0, b"hi!yo", context(stop=("!",)), logprobs=logprobs))
    cancel, delta = (message for _, message in sent)
    assert [subject for subject, _ in sent] == [inbox("w1"), inbox("gw")]
    assert cancel == Cancel(request_id="r", choice=0, epoch=1, reason="stop_string")
    assert isinstance(delta, TextDelta)
    [text] = delta.records
    assert (text.text, text.finish_reason, text.stop_reason) == ("hi", "stop", "!")
    assert unpack_ids(text.ids) == [*b"hi!"]
    assert [entry.logprob for entry in text.logprobs or ()] == [0.0, -1.0, -2.0]
    assert bench.step(record(5, b"more")) == [], "late ids of a finished leg are nothing"


def test_stop_string_at_the_last_id_needs_no_cancel() -> None:
    """The worker ended the leg at that id itself; the stop string is still the reason."""
    text = Bench().one(record(0, b"a!", context(stop=("!",)), end="length"))
    assert (text.text, text.finish_reason, text.stop_reason) == ("a", "stop", "!")


def test_ends_of_the_worker() -> None:
    """length, the model's end id and a stop id of the request are told apart."""
    for last, end, expected in (
        (b"b", "length", ("ab", "length", None)),
        (b"\0", "stop", ("a", "stop", None)),
        (b"b", "stop", ("a", "stop", ord("b"))),
    ):
        ended: End = end  # type: ignore[assignment]
        text = Bench().one(record(0, b"a" + last, context(), end=ended))
        assert (text.text, text.finish_reason, text.stop_reason) == expected
        assert len(unpack_ids(text.ids)) == 2, "the end id counts"


def test_end_without_a_new_id_releases_what_is_held() -> None:
    bench = Bench()
    bench.step(record(0, b"xa", context(stop=("ab",))))
    text = bench.one(record(2, b"", end="length"))
    assert (text.index, text.ids, text.text, text.finish_reason) == (2, b"", "a", "length")


def test_logprobs_show_text_and_raw_bytes() -> None:
    """A byte that is no character shows as U+FFFD and travels raw; one entry per id."""
    entry = TokenLogprobs(-0.5, pack_ids([0xE2, 65]), (-0.5, -2.0))
    text = Bench().one(record(0, b"\xe2", context(), logprobs=[entry]))
    assert text.text == ""
    [shown] = text.logprobs or ()
    assert (shown.logprob, shown.token, shown.raw) == (-0.5, "\ufffd", b"\xe2")
    assert shown.top == [("\ufffd", b"\xe2", -0.5), ("A", b"A", -2.0)]


def test_overlap_is_cut() -> None:
    """Ids that are known are not reported again; a whole duplicate is nothing."""
    bench = Bench()
    bench.step(record(0, b"abc", context()))
    assert bench.step(record(1, b"bc")) == []
    text = bench.one(record(1, b"bcde"))
    assert (text.index, text.text) == (3, "de")


def test_gap_drops_the_leg_and_says_so() -> None:
    """After a gap, only a context starts the leg again."""
    bench = Bench()
    bench.step(record(0, b"ab", context()))
    [(subject, lost)] = bench.step(record(3, b"d"), now=1.0)
    assert subject == inbox("gw")
    assert lost == RouteLost(request_id="r", choice=0, epoch=1, reason="gap")
    assert bench.legs.num_legs == 0
    assert bench.one(record(2, b"c", context(b"ab"), epoch=2), now=1.0).text == "c"


def test_unknown_leg_is_reported_but_not_at_every_step() -> None:
    bench = Bench(complain_s=0.25)
    sent = []
    for now in (0.0, 0.1, 0.2, 0.3):
        bench.legs.tick(now)
        sent += bench.step(record(7, b"x"), now=now)
    reasons = [message.reason for _, message in sent if isinstance(message, RouteLost)]
    assert reasons == ["unknown_leg", "unknown_leg"]


def test_a_new_epoch_without_context_is_unknown() -> None:
    """State of an older epoch is not state of the new one."""
    bench = Bench()
    bench.step(record(0, b"ab", context()))
    [(_, lost)] = bench.step(record(2, b"c", epoch=2))
    assert isinstance(lost, RouteLost)
    assert (lost.epoch, lost.reason) == (2, "unknown_leg")


def test_higher_epoch_takes_over_and_lower_ones_are_late() -> None:
    """Late tokens of a worker that was paused and woke are fenced here too."""
    bench = Bench()
    bench.step(record(0, b"abc", context()))
    text = bench.one(record(2, b"XY", context(b"ab"), epoch=2))
    assert (text.epoch, text.index, text.text) == (2, 2, "XY")
    assert bench.step(record(3, b"d"), record(0, b"q", context())) == []
    assert bench.legs.counters["late"] == 2


def test_context_at_a_known_epoch_is_ignored() -> None:
    """After a silence the worker sends it again; who still has the state goes on."""
    bench = Bench()
    bench.step(record(0, b"ab", context()))
    assert bench.one(record(2, b"c", context(b"zz"))).text == "c"


def test_context_replays_silently() -> None:
    """Held text of the replayed ids is held again; released text is not released again."""
    bench = Bench()
    text = bench.one(record(3, b"!", context(b"abx", stop=("xy",)), epoch=4))
    assert (text.index, text.text) == (3, "x!")
    other = Bench()
    text = other.one(record(2, b"\xac", context(b"\xe2\x82")))
    assert text.text == "€"


def test_prompt_tail_completes_the_first_character() -> None:
    text = Bench().one(record(0, b"\xac!", context(tail=b"abc\xe2\x82")))
    assert text.text == "€!"


def test_replayed_ids_that_hold_a_stop_string_finish_the_leg() -> None:
    """It cannot happen to an honest session; the leg ends all the same."""
    sent = Bench().step(record(3, b"z", context(b"a!b", stop=("!",))))
    cancel, delta = (message for _, message in sent)
    assert isinstance(cancel, Cancel)
    assert isinstance(delta, TextDelta)
    [text] = delta.records
    assert (text.index, text.ids, text.finish_reason, text.stop_reason) == (3, b"", "stop", "!")


def test_cancel_forgets_the_leg_and_its_late_records() -> None:
    bench = Bench()
    bench.step(record(0, b"ab", context()))
    bench.legs.receive(Cancel(request_id="r", choice=0, epoch=1), 0.0)
    assert bench.legs.num_legs == 0
    assert bench.step(record(2, b"c"), record(0, b"ab", context())) == []
    assert bench.one(record(2, b"c", context(b"ab"), epoch=2)).text == "c"
    bench.legs.receive(Cancel(request_id="r", choice=0, epoch=1), 0.0)
    assert bench.legs.num_legs == 1, "a late cancel of an older epoch does nothing"


def test_lease_is_renewed_by_every_record() -> None:
    """Silence of `lease_s` drops the leg, duplicates count as a sign of life."""
    bench = Bench(lease_s=5.0)
    bench.step(record(0, b"ab", context()), now=0.0)
    bench.step(record(0, b"ab"), now=4.0)
    bench.legs.tick(8.0)
    assert bench.legs.num_legs == 1
    bench.legs.tick(9.0)
    assert bench.legs.num_legs == 0
    [(_, lost)] = bench.step(record(2, b"c"), now=9.0)
    assert isinstance(lost, RouteLost)


def test_who_slept_judges_nobody() -> None:
    """After its own absence a detokenizer starts all leases afresh."""
    bench = Bench(lease_s=5.0)
    bench.step(record(0, b"ab", context()), now=0.0)
    bench.legs.slept(100.0)
    bench.legs.tick(100.0)
    assert bench.legs.num_legs == 1


def test_legs_are_bounded() -> None:
    """One leg too many fails as overloaded, retryable; the others go on."""
    bench = Bench(max_legs=2)
    for name in ("r1", "r2"):
        bench.step(record(0, b"a", context(), request_id=name))
    [(subject, failed)] = bench.step(record(0, b"a", context(), request_id="r3"))
    assert subject == inbox("gw")
    assert isinstance(failed, Failed)
    assert (failed.code, failed.retryable, failed.request_id) == ("overloaded", True, "r3")
    assert bench.step(record(1, b"b", request_id="r3")) == [], "said once"
    assert bench.one(record(1, b"b", request_id="r1")).text == "b"


def test_tombstones_are_bounded_and_expire() -> None:
    bench = Bench(max_tombstones=3, tombstone_s=60.0)
    for number in range(10):
        bench.step(record(0, b"a", context(), request_id=f"r{number}", end="length"))
    assert bench.step(record(0, b"a", context(), request_id="r9")) == []
    assert bench.one(record(0, b"a", context(), request_id="r0")).text == "a"
    bench.legs.tick(61.0)
    assert bench.one(record(0, b"a", context(), request_id="r9"), now=61.0).text == "a"


@settings(max_examples=200, deadline=None)
@given(
    st.text("ab!é", max_size=12).map(str.encode),
    st.sampled_from([(), ("!",), ("ab", "b!"), ("é",)]),
    st.data(),
)
def test_batching_changes_nothing(ids: bytes, stop: tuple[str, ...], data: st.DataObject) -> None:
    """However the ids come, alone, batched or again, text and finish are the same."""

    def run(cuts: list[int], again: int) -> tuple[str, list[int], str, object]:
        bench = Bench()
        text, seen, finish, reason = "", [], "", None
        edges = [0, *sorted(cuts), len(ids)]
        for number, (start, stop_at) in enumerate(pairwise(edges)):
            first = max(0, start - again)
            end: End = "length" if stop_at == len(ids) else ""
            message = record(
                first, ids[first:stop_at], None if number else context(stop=stop), end=end
            )
            for _, sent in bench.step(message):
                if isinstance(sent, TextDelta):
                    [piece] = sent.records
                    assert piece.index == len(seen)
                    seen += unpack_ids(piece.ids)
                    text += piece.text
                    assert not finish
                    finish, reason = piece.finish_reason, piece.stop_reason
        return text, seen, finish, reason

    cut = st.lists(st.integers(0, max(0, len(ids) - 1)), max_size=4, unique=True)
    assert run(data.draw(cut), data.draw(st.integers(0, 3))) == run([], 0)
