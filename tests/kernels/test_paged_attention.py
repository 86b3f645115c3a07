from itertools import accumulate

import pytest
import torch

from kernels.paged_attention import (
    SCALE_BYTES,
    AttentionGroup,
    Sight,
    attention_reference,
    paged_attention,
    write_kv,
)

BLOCK = 16


def computed(dtype):
    """What is computed in with a cache of `dtype`."""
    return torch.float32 if dtype == torch.int8 else dtype


class Paged:
    """Sequences of random keys and values in shuffled pages, the free pages full of junk."""

    def __init__(self, lengths, kv_heads, head_dim, dtype):
        self.lengths = lengths
        self.keys_values = [
            torch.randn(length, 2 * kv_heads, head_dim).to(computed(dtype)) for length in lengths
        ]
        counts = [-(-length // BLOCK) for length in lengths]
        pages = torch.randperm(sum(counts) + 3).tolist()
        ends = list(accumulate(counts))
        self.tables = [pages[end - count : end] for end, count in zip(ends, counts, strict=True)]
        width, junk = (head_dim + SCALE_BYTES, 111) if dtype == torch.int8 else (head_dim, 1e4)
        self.cache = torch.full((2, kv_heads, len(pages), BLOCK, width), junk, dtype=dtype)
        for table, rows in zip(self.tables, self.keys_values, strict=True):
            slots = [table[p // BLOCK] * BLOCK + p % BLOCK for p in range(len(rows))]
            write_kv(rows, self.cache, torch.tensor(slots))

    def group(self, chosen, rows, start=0, window=0, sinks=0):
        """The last `rows` rows of each chosen sequence: all as far from their sinks, if any."""
        skipped = [Sight(window).first_block(self.lengths[i] - rows, BLOCK) for i in chosen]
        tables = [self.tables[i][skip:] for i, skip in zip(chosen, skipped, strict=True)]
        apart = sinks > 0 and skipped[0] > 0
        if apart:
            kept = sinks // BLOCK
            skipped = [skip - kept for skip in skipped]
            tables = [
                self.tables[i][:kept] + table for i, table in zip(chosen, tables, strict=True)
            ]
        width = max(map(len, tables))
        ids = [table + table[-1:] * (width - len(table)) for table in tables]
        firsts = torch.tensor([self.lengths[i] - rows for i in chosen])
        firsts -= torch.tensor(skipped) * BLOCK
        shared = 0 if window else int(firsts.min())
        positions = (firsts[:, None] + torch.arange(rows))[:, :, None, None]
        places = torch.arange(shared, width * BLOCK)
        hidden = places > positions
        if window:
            hidden |= (places >= sinks) & (places <= positions - window)
        stop = start + rows * len(chosen)
        blocks = torch.tensor(ids).flatten()
        return AttentionGroup(start, stop, len(chosen), blocks, shared, hidden, sinks, apart)

    def expected(self, i, queries, **options):
        keys, values = self.keys_values[i].chunk(2, dim=1)
        return attention_reference(queries, keys, values, **options)


HEADS = [(9, 3, 64), (4, 4, 16), (8, 1, 20)]
DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 3e-2), (torch.int8, 5e-2)]


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_decode_rows_of_unequal_length(heads, kv_heads, head_dim, dtype, tolerance):
    """Padding and foreign pages do not show in any row."""
    lengths = [1, 15, 16, 17, 300, 31]
    paged = Paged(lengths, kv_heads, head_dim, dtype)
    queries = torch.randn(len(lengths), heads, head_dim).to(computed(dtype))
    out = paged_attention(queries, paged.cache, [paged.group(range(len(lengths)), 1)])
    for i in range(len(lengths)):
        expected = paged.expected(i, queries[i : i + 1])[0]
        torch.testing.assert_close(out[i], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_chunks_and_decode_rows_in_one_step(heads, kv_heads, head_dim, dtype, tolerance):
    """A chunk sees its prefix and itself, never its own future; groups do not mix."""
    paged = Paged([40, 37, 530], kv_heads, head_dim, dtype)
    rows = [1, 33, 129]
    starts = [0, 1, 34]
    queries = torch.randn(sum(rows), heads, head_dim).to(computed(dtype))
    groups = [paged.group([i], rows[i], starts[i]) for i in range(3)]
    out = paged_attention(queries, paged.cache, groups)
    for i, group in enumerate(groups):
        part = slice(group.start, group.stop)
        expected = paged.expected(i, queries[part])
        torch.testing.assert_close(out[part], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("length", [5, 16, 200, 257, 700])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_a_row_in_fp32_is_bitwise_the_same_in_every_batch(length, heads, kv_heads, head_dim):
    """Alone, beside longer ones, or as the end of a chunk: the same bits."""
    lengths = [length, 3, length + 61, 800]
    paged = Paged(lengths, kv_heads, head_dim, torch.float32)
    queries = torch.randn(4, heads, head_dim)
    alone = paged_attention(queries[:1], paged.cache, [paged.group([0], 1)])
    for company in ([0, 1], [0, 2], [0, 1, 2, 3]):
        out = paged_attention(queries[: len(company)], paged.cache, [paged.group(company, 1)])
        assert torch.equal(out[:1], alone), company
    for rows in {2, min(5, length), min(length, 130)}:
        chunk = torch.randn(rows, heads, head_dim)
        chunk[-1] = queries[0]
        out = paged_attention(chunk, paged.cache, [paged.group([0], rows)])
        assert torch.equal(out[-1:], alone), rows


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
@pytest.mark.parametrize("window", [1, 16, 23, 300])
def test_a_window_scale_and_soft_cap(window, heads, kv_heads, head_dim, dtype, tolerance):
    """Decode rows of unequal length and a chunk longer than the window, as the formula says."""
    options = {"scale": 0.31, "cap": 2.5}
    lengths = [1, 17, 290, 530, 620]
    paged = Paged(lengths, kv_heads, head_dim, dtype)
    queries = torch.randn(4 + 70, heads, head_dim).to(computed(dtype))
    groups = [paged.group(range(4), 1, 0, window), paged.group([4], 70, 4, window)]
    out = paged_attention(queries, paged.cache, groups, *options.values())
    for i in range(5):
        part = slice(i, i + 1) if i < 4 else slice(4, None)
        expected = paged.expected(i, queries[part], **options, sight=Sight(window))
        torch.testing.assert_close(out[part], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("length", [5, 200, 257, 700])
@pytest.mark.parametrize("window", [7, 16, 300])
def test_a_windowed_row_in_fp32_is_bitwise_the_same_in_every_batch(length, window):
    """Whichever blocks its company makes the group gather."""
    options = (0.2, 3.0)
    lengths = [length, 3, length + 61, 800]
    paged = Paged(lengths, 3, 64, torch.float32)
    queries = torch.randn(4, 9, 64)
    group = paged.group([0], 1, 0, window)
    alone = paged_attention(queries[:1], paged.cache, [group], *options)
    for company in ([0, 1], [0, 2], [0, 1, 2, 3]):
        groups = [paged.group(company, 1, 0, window)]
        out = paged_attention(queries[: len(company)], paged.cache, groups, *options)
        assert torch.equal(out[:1], alone), company
    for rows in {2, min(5, length), min(length, 130)}:
        chunk = torch.randn(rows, 9, 64)
        chunk[-1] = queries[0]
        groups = [paged.group([0], rows, 0, window)]
        out = paged_attention(chunk, paged.cache, groups, *options)
        assert torch.equal(out[-1:], alone), rows


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("sinks", [16, 32])
@pytest.mark.parametrize("window", [23, 300])
def test_sinks_meet_queries_of_their_own(window, sinks, dtype, tolerance):
    """Rows that see everything, rows far from their sinks, and a chunk that leaves them."""
    lengths = [1, 17, 290, 900, 930, 620]
    paged = Paged(lengths, 3, 64, dtype)
    queries, near = torch.randn(2, 5 + 70, 9, 64).to(computed(dtype))
    groups = [
        paged.group([0, 1], 1, 0, window, sinks),
        paged.group([2], 1, 2, window, sinks),
        paged.group([3, 4], 1, 3, window, sinks),
        paged.group([5], 70, 5, window, sinks),
    ]
    assert [group.apart for group in groups] == [False, window == 23, True, window == 23]
    out = paged_attention(queries, paged.cache, groups, sink_queries=near)
    for i in range(6):
        part = slice(i, i + 1) if i < 5 else slice(5, None)
        sight = {"sight": Sight(window, sinks), "sink_queries": near[part]}
        expected = paged.expected(i, queries[part], **sight)
        torch.testing.assert_close(out[part], expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("length", [5, 250, 330, 700])
def test_a_row_with_sinks_is_bitwise_the_same_in_every_batch(length, dtype):
    """As the only row, or the end of a chunk that began before the sinks were left behind."""
    paged, (window, sinks) = Paged([length, 3, 800], 3, 64, dtype), (60, 16)
    queries, near = torch.randn(2, 1, 9, 64)
    alone = paged_attention(
        queries, paged.cache, [paged.group([0], 1, 0, window, sinks)], sink_queries=near
    )
    for rows in {2, min(5, length), min(length, 128)}:
        chunk, turned = torch.randn(2, rows, 9, 64)
        chunk[-1], turned[-1] = queries[0], near[0]
        groups = [paged.group([0], rows, 0, window, sinks)]
        out = paged_attention(chunk, paged.cache, groups, sink_queries=turned)
        assert torch.equal(out[-1:], alone), rows


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_not_rounded_away(bad):
    """It spoils the head of its token, and nothing else in an int8 cache."""
    cache = torch.zeros(2, 1, 2, BLOCK, 32 + SCALE_BYTES, dtype=torch.int8)
    rows = torch.randn(2, 2, 32)
    rows[1, 0, 7] = bad
    write_kv(rows, cache, torch.tensor([3, 20]))
    scales = cache[..., -SCALE_BYTES:].contiguous().view(torch.float32)[..., 0]
    assert scales[0, 0, 1, 4].isnan()
    assert scales.isnan().sum() == 1
    kept = cache[1, 0, 0, 3, :32] * scales[1, 0, 0, 3]
    torch.testing.assert_close(kept, rows[0, 1], atol=0.02, rtol=0)
