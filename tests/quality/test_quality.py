"""The numbers of `make quality` are those of their formulas."""

import math

import pytest
import torch

from services.gpu_worker.config import WorkerConfig
from services.gpu_worker.kv_policy import FULL, KvPolicy
from shared.sampling import SamplingParams
from tests.quality import llama_cpp
from tests.quality.__main__ import Row, caches, precisions, table, told
from tests.quality.measure import Distance, Summary, distances, logprobs, scored, windows
from tests.services.gpu_worker.core_kit import Ask, Core
from tests.services.gpu_worker.tiny_families import VOCAB, int8_runner_of, reference, runner_of

IDS = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    reference("llama").save_pretrained(path)
    return path


def test_windows_share_nothing_and_the_rest_is_left_out():
    assert windows([*range(10)], 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert windows([*range(8)], 4) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="context: 11 ids, but the text has 10"):
        windows([*range(10)], 11)


@pytest.mark.parametrize(("context", "ids"), [(8, [5, 6, 7]), (7, [4, 5, 6])])
def test_what_counts_is_the_second_half_but_for_the_id_that_begins_it(context, ids):
    """As in llama.cpp: the logits of position context // 2 are the first that are read."""
    assert scored([*range(context)]) == ids


def test_logprobs_are_those_that_a_client_gets_of_its_prompt(folder):
    runner = runner_of(folder)
    found = logprobs(runner, IDS)
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    [answer] = Core(runner, batch=1, chunk=32).answers([Ask(IDS, sampling)])

    asked = [entry.logprob for entry in answer.prompt_logprobs][-len(found) :]
    ids = scored(IDS)
    assert [row[place].item() for row, place in zip(found, ids, strict=True)] == asked


def test_a_distance_is_its_formula():
    reference = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.2, 0.7]]).log()
    distance = Distance.of(reference, other, [1, 2])
    summary = Summary.of(distance)

    assert distance.same_best == [False, True]
    assert distance.kl == pytest.approx([0.25 * math.log(2), 0])
    assert summary.perplexity == pytest.approx((0.5 * 0.7) ** -0.5)
    assert summary.change == pytest.approx(0.5**0.5 - 1)  # id 1 twice as likely, id 2 the same
    assert summary.change_error == pytest.approx(math.log(2) / 2)
    assert (summary.kl, summary.same_best) == (pytest.approx(0.125 * math.log(2)), 0.5)


def test_fp32_is_at_no_distance_from_itself_and_int8_at_some(folder):
    fp32, int8 = runner_of(folder), int8_runner_of(folder)
    same, other = distances(fp32, [fp32, int8], windows(IDS, 50))
    assert (same.change, same.change_error, same.kl, same.same_best) == (0, 0, 0, 1)
    assert other.kl > 0
    assert other.change_error > 0


def test_every_setting_of_a_worker_is_in_the_table_once():
    """And none that it would refuse."""
    told_pairs = [pair for pairs in precisions().values() for pair in pairs]
    assert len({*told_pairs}) == len(told_pairs) == 9
    assert next(iter(precisions())) == "fp32"
    for dtype, quantize in told_pairs:
        WorkerConfig(dtype=dtype, quantize=quantize)


def test_a_table_says_what_was_measured():
    summary = Summary(22.0, 0.1, 0.005, 0.0123, 0.925)
    rows = [
        Row("fp32", "fp32 + none", 20.0, Summary(20.0, 0, 0, 0, 1)),
        Row("int8", told([("auto", "auto"), ("auto", "w8a8")]), 22.0, summary),
        Row("llama.cpp", "", 21.0, None),
    ]
    assert table(rows).splitlines()[2:] == [
        "| fp32 | fp32 + none | 20.000 |  |  |  |",
        "| int8 | auto + auto/w8a8 | 22.000 | +10.00 % ± 0.50 | 0.0123 | 92.5 % |",
        "| llama.cpp |  | 21.000 | +5.00 % |  |  |",
    ]


def test_every_kind_of_cache_is_asked_for():
    """The first is what the others are compared with."""
    found = caches(32)
    assert {(cache.kv_dtype, cache.policy.lossy) for cache in found} == {
        ("auto", False),
        ("int8", False),
        ("auto", True),
        ("int8", True),
    }
    assert found[0].policy == FULL
    assert (found[0].kv_dtype, found[0].computed) == ("auto", ("fp32", "none"))


def test_a_window_counts_where_a_text_is_longer(folder):
    """The same logits while it is not, others when it is."""
    wide, narrow = (runner_of(folder, policy=KvPolicy(size)) for size in (50, 20))
    same, other = distances(runner_of(folder), [wide, narrow], windows(IDS, 50))
    assert (same.change, same.kl, same.same_best) == (0, 0, 1)
    assert other.kl > 0


def test_what_llama_perplexity_says_is_read():
    """And where it says nothing, the end of what it did say is in the error."""
    output = "x: calculating perplexity over 7 chunks, n_ctx=512\n[1]20.1\n"
    assert llama_cpp.said(f"{output}Final estimate: PPL = 21.9034 +/- 0.9\n") == (7, 21.9034)
    with pytest.raises(ValueError, match=r"(?s)llama-perplexity: .*no such file$"):
        llama_cpp.said(f"{output}no such file\n")


def test_a_named_program_must_be_there(monkeypatch, tmp_path):
    monkeypatch.setenv(llama_cpp.VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"LLAMA_PERPLEXITY: '.*gone' is no program"):
        llama_cpp.binary()
