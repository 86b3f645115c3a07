"""The bench counts what was sent, and a run ends with a page that has its numbers."""

import itertools
import json
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.bench import __main__ as bench
from tests.bench.profiling import phase_seconds
from tests.bench.report import markdown, shown
from tests.bench.servers import parse_peers
from tests.bench.stats import advantage, percentile, poisson_times
from tests.bench.stream import Answer, AskFailed, EventReader
from tests.bench.workloads import intervals, overlapping, prompt_ids

USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
TEXTS = ["one", "[DONE]", 'data: {"choices": []}\n\ndata: {']


def sse(*, own_usage: bool, newline: bytes = b"\n") -> bytes:
    """An answer of three tokens; usage in an event of its own, as OpenAI has it, or in the last."""
    events: list[dict[str, object]] = [{"choices": [{"text": text}]} for text in TEXTS]
    if own_usage:
        events.append({"choices": [], "usage": USAGE})
    else:
        events[-1]["usage"] = USAGE
    frames = [b"data: " + json.dumps(event).encode() for event in events]
    frames = [b": ping", b"id: 7" + newline + frames[0], *frames[1:], b"data: [DONE]"]
    return b"".join(frame + newline * 2 for frame in frames)


def http(body: bytes, cuts: list[int], *, chunked: bool, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\n" + ("Transfer-Encoding: chunked\r\n" if chunked else "") + "\r\n"
    if not chunked:
        return head.encode() + body
    chunks = pieces(body, cuts)
    return head.encode() + b"".join(b"%x\r\n%b\r\n" % (len(c), c) for c in chunks) + b"0\r\n\r\n"


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    """`data` cut at `cuts`, no piece empty."""
    at = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(at)]


CUTS = st.lists(st.integers(0, 2000), max_size=12)


@given(CUTS, CUTS, st.booleans(), st.booleans(), st.sampled_from([b"\n", b"\r\n"]))
def test_a_stream_is_counted_however_it_is_cut(
    chunks: list[int], reads: list[int], chunked: bool, own_usage: bool, newline: bytes
) -> None:
    """Each event with choices once, at the time of the read that completes it; usage of the end."""
    reader = EventReader()
    arrived = pieces(
        http(sse(own_usage=own_usage, newline=newline), chunks, chunked=chunked), reads
    )
    for number, data in enumerate(arrived):
        reader.feed(data, float(number))
    answer = reader.answer(sent_s=-1.0)

    assert len(answer.times) == len(TEXTS)
    assert answer.times == sorted(answer.times)
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (5, 3, 4)
    assert reader.ended == chunked


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"", "HTTP nothing"),
        (http(b'{"error": "too long"}', [], chunked=True, status="400 Bad Request"), "too long"),
        (http(b'data: {"choices": [{}]}\n\n', [], chunked=False), "without usage"),
        (http(b'data: {"error": "gone"}\n\n', [], chunked=False), "gone"),
        (http(b'data: {"choices": [], "usage": {"a": 1}}\n\n', [], chunked=False), "no event"),
    ],
)
def test_what_is_no_whole_answer_is_said(sent: bytes, says: str) -> None:
    """A refusal, a stream that breaks off and one without tokens are no measurements."""
    reader = EventReader()
    reader.feed(sent, 0.0)
    with pytest.raises(AskFailed, match=says):
        reader.answer(0.0)


def test_latencies_are_those_of_vllm_bench_serve() -> None:
    """TTFT from sending, TPOT over the tokens after the first, ITL between events."""
    answer = Answer(1.0, [1.5, 2.0, 4.5], prompt_tokens=5, output_tokens=4, cached_tokens=0)

    assert (answer.ttft_s, answer.e2el_s, answer.tpot_s) == (0.5, 3.5, 1.0)
    assert answer.itls_s == [0.5, 2.5]


def test_a_stall_belongs_to_the_time_it_overlaps() -> None:
    """The wait that begins before a long prompt or ends after it is part of what it did."""
    answer = Answer(0.0, [1.0, 2.0, 5.0, 6.0], 1, 4, 0)

    assert intervals([answer], 1.0, 2.0) == [1.0]
    assert overlapping([answer], 3.0, 4.0) == [3.0]


def test_percentiles_lie_between_neighbours() -> None:
    """As numpy has them."""
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([7.0], 0.99) == 7.0
    assert shown(percentile([], 0.5)) == "-"


def test_an_advantage_is_above_one_whichever_way_is_better() -> None:
    """Twice the throughput and half the time are both twice as good, round by round."""
    assert advantage([20.0, 60.0], [10.0, 20.0], more_is_better=True) == (2.5, 2.0, 3.0)
    assert advantage([5.0], [10.0], more_is_better=False).median == 2.0


def test_arrivals_are_one_pattern_at_any_rate() -> None:
    """The same seed: the same pattern, stretched; on average as often as asked."""
    slow = poisson_times(2.0, 2000, random.Random("x"))
    fast = poisson_times(8.0, 2000, random.Random("x"))

    assert fast == pytest.approx([time / 4 for time in slow])
    assert 2000 / slow[-1] == pytest.approx(2.0, rel=0.1)


def test_rounds_have_no_prompt_in_common() -> None:
    """The same salt gives every server the same ids, another one others."""
    assert prompt_ids("a", 128) == prompt_ids("a", 128)
    assert prompt_ids("a", 16) != prompt_ids("b", 16)


def test_peers_are_urls_or_commands() -> None:
    """Several are divided by semicolons; options of a command may have an equals sign."""
    assert parse_peers("") == []
    assert parse_peers("a=http://x:1; b=run --k=v --port {port}") == [
        ("a", "http://x:1"),
        ("b", "run --k=v --port {port}"),
    ]


@pytest.mark.parametrize(
    "text", ["a", "=http://x", "a=run", "shoal=http://x", "a=http://x;a=http://y"]
)
def test_bad_peers_are_named(text: str) -> None:
    """Before anything is started."""
    with pytest.raises(ValueError, match="PEERS"):
        parse_peers(text)


def test_phases_are_read_from_metrics() -> None:
    """Summed over workers; whatever else is there is left alone."""
    text = (
        "# TYPE shoal:engine_phase_seconds_total counter\n"
        'shoal:engine_phase_seconds_total{worker="a",phase="gemm"} 1.5\n'
        'shoal:engine_phase_seconds_total{phase="gemm",worker="b"} 2\n'
        'shoal:engine_phase_seconds_created{phase="gemm"} 9\n'
    )
    assert phase_seconds(text) == {"gemm": 3.5}


def test_an_open_loop_brings_what_tells_its_rate() -> None:
    """70 % of capacity needs the capacity; an unknown name is refused."""
    assert [w.name for w in bench.chosen("poisson")] == ["streams-32", "poisson"]
    with pytest.raises(ValueError, match="stream-1"):
        bench.chosen("stream-1")


def test_tables_are_aligned() -> None:
    """They read well as text."""
    lines = markdown(["a", "long head"], [["long cell", "1"]]).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_a_run_writes_its_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A mesh, a peer by command beside it, every table with a factor, the profile, the page."""
    page = tmp_path / "page.md"
    monkeypatch.setattr(bench, "DOCUMENT", page)
    stand_in = f"{sys.executable} {Path(__file__).with_name('stand_in.py')} {{port}}"
    options = ["--engine", "sim", "--rounds", "1", "--only", "streams-8", "--profile", "--write"]
    fast = "gpu_worker.sim.step_ms=1"
    monkeypatch.setattr(sys, "argv", ["bench", fast, *options, "--peers", f"other={stand_in}"])

    bench.main()

    text = page.read_text()
    assert text in capsys.readouterr().out
    (row,) = [line for line in text.splitlines() if line.startswith("| other ") and "x**" in line]
    assert row.count("x**") == 5
    assert "| gpu_worker-0 engine " in text
    assert "`python" in text
    assert str(tmp_path) not in text
