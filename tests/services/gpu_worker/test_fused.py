"""The compiled step against the decoder in torch, for every family."""

import types

import pytest
import torch

from services.gpu_worker.loader import load_model
from services.gpu_worker.loader.packed import PackedCache
from services.gpu_worker.loader.source import Source
from services.gpu_worker.models.fused import FusedDecoder, Span
from services.gpu_worker.models.fused_weights import pack_weights
from tests.services.gpu_worker.tiny_families import CASES, VOCAB, reference, reference_logits

IDS = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(150)]
BLOCKS = [*range(30, 20, -1)]
OTHERS = [Span([5] * 20, 0, [0, 1]), Span([7], 0, [2])]


@pytest.fixture(scope="module", params=[*CASES])
def pair(request, tmp_path_factory):
    """A reference, and the compiled step over the directory that it wrote."""
    model = reference(request.param)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    config, weights = load_model(folder, torch.float32)
    fused = FusedDecoder(config, pack_weights(config, weights), 300, 40, num_threads=2)
    yield model, fused
    fused.close()


@pytest.fixture(scope="module")
def whole(pair):
    """Logits of every position of `IDS`, computed in one piece."""
    return computed(pair[1], [len(IDS)])


def computed(fused, chunks, before=(), after=()):
    """Logits of `IDS` in chunks of these sizes, each among other sequences."""
    found, position = [], 0
    for size in chunks:
        span = Span(IDS[position : position + size], position, BLOCKS)
        fused.forward([*before, span, *after])
        first = sum(len(other.ids) for other in before)
        found.append(fused.logits([*range(first, first + len(span.ids))]).values.clone())
        position += size
    return torch.cat(found)


def test_logits_are_near_those_of_transformers(pair, whole):
    """What 8 bits of weights and activations cost a random model, whose logits are all noise."""
    expected = reference_logits(pair[0], IDS)
    off = (whole - expected).square().mean().sqrt() / expected.std()
    assert off < 0.08
    assert (whole.argmax(-1) == expected.argmax(-1)).float().mean() > 0.8


@pytest.mark.parametrize(
    ("chunks", "before", "after"),
    [
        ([150], OTHERS, OTHERS[:1]),
        ([1] * 150, (), ()),
        ([64, 64, 22], OTHERS[1:], ()),
        ([13, 1, 40, 1, 95], (), OTHERS),
    ],
)
def test_a_sequence_is_bitwise_what_it_is_alone(pair, whole, chunks, before, after):
    """Whatever the chunks and the company."""
    assert torch.equal(computed(pair[1], chunks, before, after), whole)


def test_what_it_says_of_logits_is_so(pair):
    """The best id, and that all are finite."""
    fused = pair[1]
    fused.forward([Span(IDS, 0, BLOCKS)])
    logits = fused.logits([*range(len(IDS))])
    assert logits.best == logits.values.argmax(-1).tolist()
    assert all(logits.sound)
    assert torch.equal(fused.logits([7]).values[0], logits.values[7])


def test_who_reads_no_values_is_told_the_same(pair):
    """The best ids, and which rows are sound, of few rows and of many."""
    fused = pair[1]
    fused.pool[0] = float("nan")
    fused.forward([Span([5], 19, [0, 1]), *OTHERS[1:], Span(IDS, 0, BLOCKS)])
    fused.pool[0] = 0
    for rows in ([0, 2], [*range(len(IDS))]):
        whole, told = fused.logits(rows), fused.logits(rows, values=False)
        assert told.values.shape == (len(rows), 0)
        assert (told.best, told.sound) == (whole.best, whole.sound)
        assert not told.sound[0]


def test_a_broken_block_spoils_its_own_sequence_only(pair):
    """NaN in a block shows in the logits of who sees it, as a fault and not as a number."""
    fused = pair[1]
    fused.forward(OTHERS)
    sound = fused.logits([len(OTHERS[0].ids)]).values.clone()
    fused.pool[0] = float("nan")
    fused.forward([Span([5], 19, [0, 1]), OTHERS[1]])
    logits = fused.logits([0, 1])
    assert logits.sound == [False, True]
    assert torch.equal(logits.values[1:], sound)
    fused.pool[0] = 0


def test_a_model_from_the_cache_is_bitwise_the_one_that_was_packed(pair, whole, tmp_path):
    """And was not packed again."""
    pair[0].save_pretrained(tmp_path)
    source, cache = Source.of(tmp_path), PackedCache(tmp_path / "cache", 1 << 30)
    config, weights = load_model(tmp_path, torch.float32)
    cache.load(source, lambda: pack_weights(config, weights))
    mapped = FusedDecoder(config, cache.load(source, dict), 300, 40, num_threads=2)
    assert torch.equal(computed(mapped, [len(IDS)]), whole)
    mapped.close()


def test_more_threads_than_it_has_room_for_are_fewer(pair, tmp_path):
    """And the logits the same."""
    pair[0].save_pretrained(tmp_path)
    config, weights = load_model(tmp_path, torch.float32)
    many = FusedDecoder(config, pack_weights(config, weights), 300, 40, num_threads=100)
    assert torch.equal(computed(many, [40]), computed(pair[1], [40]))
    many.close()


def test_more_query_heads_than_it_has_room_for_are_refused():
    config = types.SimpleNamespace(num_heads=129, num_kv_heads=1)
    with pytest.raises(ValueError, match="129 query heads"):
        FusedDecoder(config, {}, 1, 1, 1)
