"""The operations of the compiled step against their formulas, on odd shapes."""

import ctypes

import pytest
import torch

from kernels.cpu.library import WIDENED, AttentionTile, Matrix, library
from kernels.cpu.pack import pack, pad_blocks, padded
from kernels.cpu.rotation import rotation, spread
from kernels.paged_attention import EVERYTHING, Sight, attention_reference

PORTABLE = "x86-64-v3"  # neither dot instructions nor a matrix unit
BUILDS = ["native", PORTABLE]
PAGE = 16


def described(packed):
    """`packed` as the library reads it; the tensors must outlive it."""
    bias = None if packed.bias is None else packed.bias.data_ptr()
    pointers = (packed.weights.data_ptr(), packed.scales.data_ptr(), packed.offsets.data_ptr())
    return Matrix(packed.out, packed.in_, packed.group, *pointers, bias)


def linear(build, packed, x):
    wide = torch.zeros(len(x), packed.in_)
    wide[:, : x.shape[1]] = x
    y = torch.empty(len(x), packed.out)
    matrix = described(packed)
    library(build).shoal_linear(ctypes.byref(matrix), wide.data_ptr(), len(x), y.data_ptr())
    return y


def linear_reference(packed, x):
    """The same rounding, exact sums, and the same few fp32 operations after them. A product and a
    sum that are rounded once there are computed in fp64 here.
    """
    wide = torch.zeros(len(x), packed.in_)
    wide[:, : x.shape[1]] = x
    groups = wide.view(len(x), -1, packed.group)
    top = groups.abs().amax(-1)
    inverse = torch.where(top > 0, 127 / top, 0)
    steps = (groups * inverse[..., None]).round().long()
    weights = packed.weights.transpose(1, 2).reshape(packed.out, -1, packed.group).long()
    total = torch.zeros(len(x), packed.out)
    for g in range(groups.shape[1]):
        sums = (steps[:, g] @ weights[:, g].t()).float().double()
        total = (total.double() + sums * (top[:, g] / 127)[:, None].double()).float()
    total = total * packed.scales
    return total if packed.bias is None else total + packed.bias


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 3, 7, 8, 9, 12, 16, 17, 33, 50])
@pytest.mark.parametrize(("out", "in_"), [(16, 64), (5, 3), (112, 130), (160, 576), (208, 1000)])
def test_linear_is_its_formula_bit_for_bit(build, grouped, rows, out, in_):
    """Every tile and both instruction sets: integers are exact, and the rest is the same order."""
    torch.manual_seed(rows)
    packed = pack(torch.randn(out, in_), torch.randn(out), grouped=grouped)
    x = torch.randn(rows, in_) * 10
    assert torch.equal(linear(build, packed, x), linear_reference(packed, x))


def test_extremes_do_not_overflow():
    """The largest steps of both sides, with the same sign throughout."""
    packed = pack(torch.full((16, 4096), -1.0))
    x = torch.full((13, 4096), 1e30)
    assert torch.equal(linear("native", packed, x), linear_reference(packed, x))


def test_zero_rows_and_zero_outputs_are_zero():
    weight = torch.randn(32, 64)
    weight[7] = 0
    y = linear("native", pack(weight), torch.stack([torch.zeros(64), torch.randn(64)]))
    assert not y[0].any()
    assert y[1, 7] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("rows", [2, 20])
def test_what_is_not_finite_stays_so_in_its_row(bad, rows):
    """Rounding must not turn a broken number into a sound one, nor spoil the rows beside it."""
    packed = pack(torch.randn(64, 1024), grouped=True)
    assert packed.group == 512
    x = torch.randn(rows, 1024)
    sound = linear("native", packed, x)
    x[1, 700] = bad
    y = linear("native", packed, x)
    assert not y[1].isfinite().any()
    assert torch.equal(y[0], sound[0])
    assert torch.equal(y[2:], sound[2:])


def test_packing_rounds_to_the_nearest_step():
    weight = torch.randn(40, 70)
    packed = pack(weight)
    steps = packed.weights.transpose(1, 2).reshape(packed.out, packed.in_)
    off = ((steps.float() * packed.scales[:, None])[:40, :70] - weight).abs()
    assert (off <= packed.scales[:40, None] * 0.5001).all()


@pytest.mark.parametrize("size", [1, 2, 9, 64, 576, 96])
def test_a_rotation_is_orthogonal(size):
    q = rotation(size)
    torch.testing.assert_close(q @ q.t(), torch.eye(size, dtype=torch.float64))


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("count", [64, 192, 576, 1024, 1536])
def test_a_spread_input_times_a_spread_weight_is_the_product(build, count):
    """The two halves undo each other, and one large input is spread over many."""
    weight, x = torch.randint(-9, 9, (5, count)).double(), torch.randint(-9, 9, (count,)).float()
    x[17] = 1e5
    turned = x.clone()
    library(build).shoal_spread(turned.data_ptr(), count)
    assert torch.equal(spread(weight) @ turned.double(), weight @ x.double())
    assert (turned.abs() > 9e4).sum() == (count & -count) // 16 > 1


@pytest.mark.parametrize(("columns", "group"), [(64, 64), (576, 192), (1536, 512), (704, 64)])
def test_groups_are_large_and_leave_no_rest(columns, group):
    assert pack(torch.ones(16, columns), grouped=True).group == group


def test_blocks_are_padded_apart():
    padded_weight = pad_blocks(torch.arange(6.0).view(1, 6), 2, 4, dim=1)
    assert padded_weight.tolist() == [[0, 1, 2, 0, 3, 4, 5, 0]]


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize(
    ("which", "formula", "x", "rtol"),
    [
        (0, torch.exp, torch.linspace(-86, 86, 4000), 4e-7),
        (1, torch.sigmoid, torch.linspace(-79, 79, 4000), 4e-7),
        (2, torch.exp2, torch.linspace(-126, 0, 4000), 1.3e-4),
    ],
)
def test_elementwise(build, which, formula, x, rtol):
    """Within 3 units in the last place, or what bf16 is to keep; NaN is kept, nothing overflows."""
    x = torch.cat((x, -torch.rand(96) * 1e-3))
    y = elementwise(build, which, x)
    torch.testing.assert_close(y, formula(x.double()).float(), rtol=rtol, atol=0)
    edge = elementwise(build, which, torch.tensor([float("-inf"), -200.0, 0.0, float("nan")] * 4))
    assert 0 <= edge[:2].min() <= edge[:2].max() < 2e-35
    assert edge[2] == (0.5 if which == 1 else 1)
    assert edge[3].isnan()


def elementwise(build, which, x):
    y = x.clone()
    library(build).shoal_elementwise(which, y.data_ptr(), len(y))
    return y


class Pages:
    """One KV head of a sequence in shuffled pages, the free slots full of zeros. Of int8 the keys
    and values are what the pages mean.
    """

    def __init__(self, tokens, dims, int8=False):
        self.dims = padded(dims, 32)
        self.int8 = int8
        pairs = torch.randn(2, tokens, dims).bfloat16()
        if int8:
            scales = torch.rand(2, tokens, 1) / 50
            pairs = torch.randint(-127, 128, (2, tokens, dims)).float()
        self.keys, self.values = pairs * scales if int8 else pairs
        count = -(-tokens // PAGE)
        self.table = torch.randperm(count + 2, dtype=torch.int32)[:count]
        keys = torch.zeros(2, count * PAGE, self.dims, dtype=torch.int8 if int8 else torch.bfloat16)
        keys[:, :tokens, :dims] = pairs
        k = keys[0].view(count, PAGE, self.dims // 2, 2).transpose(1, 2)
        v = keys[1].view(count, PAGE // 2, 2, self.dims).transpose(2, 3)
        parts = [k.reshape(count, -1), v.reshape(count, -1)]
        if int8:
            wide = torch.zeros(2, count * PAGE)
            wide[:, :tokens] = scales[..., 0]
            parts += [part.reshape(count, PAGE).view(torch.int8) for part in wide]
        self.pool = torch.zeros(count + 2, sum(p.shape[1] for p in parts), dtype=keys.dtype)
        self.pool[self.table.long()] = torch.cat(parts, 1)

    def attend(self, build, queries, sight=EVERYTHING, cap=0.0):
        """`queries` [rows, heads, dims] are the last of the sequence."""
        rows, heads, dims = queries.shape
        wide = torch.zeros(rows * heads, self.dims, dtype=torch.bfloat16)
        wide[:, :dims] = queries.flatten(0, 1)
        out = torch.full((rows * heads, self.dims), 7.0)
        room = rows * heads * (len(self.table) + 1) * PAGE
        widened = torch.empty(WIDENED * 2 * PAGE * self.dims, dtype=torch.bfloat16)
        scores, weights = torch.empty(room), torch.zeros(room, dtype=torch.bfloat16)
        tile = AttentionTile(
            pool=self.pool.data_ptr(),
            page_stride=self.pool[0].nbytes,
            table=self.table.data_ptr(),
            dims=self.dims,
            int8=self.int8,
            queries=wide.data_ptr(),
            sink_queries=wide.data_ptr(),
            rows=rows * heads,
            heads=heads,
            position=len(self.keys) - rows,
            window=sight.window,
            sinks=sight.sinks,
            cap=cap,
            out=out.data_ptr(),
            out_stride=self.dims,
            scores=scores.data_ptr(),
            weights=weights.data_ptr(),
            widened=widened.data_ptr(),
        )
        library(build).shoal_attend(ctypes.byref(tile))
        return out[:, :dims].view(rows, heads, dims)


@pytest.mark.parametrize("build", BUILDS)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (5, 0), (40, 0), (5, 32), (40, 16)])
@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize(
    ("tokens", "rows", "heads", "dims"),
    [(1, 1, 1, 16), (17, 1, 3, 64), (100, 5, 3, 64), (64, 16, 1, 20), (333, 5, 8, 128)],
)
def test_attention_is_its_formula(build, int8, window, sinks, cap, tokens, rows, heads, dims):
    """But for weights and products in bf16."""
    torch.manual_seed(tokens)
    sight, pages = Sight(window, sinks), Pages(tokens, dims, int8)
    queries = (torch.randn(rows, heads, dims) * 0.3).bfloat16()
    expected = attention_reference(
        queries.float(), pages.keys[:, None], pages.values[:, None], 1.0, cap, sight
    )
    found = pages.attend(build, queries, sight, cap)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("sight", [Sight(), Sight(40), Sight(40, 16), Sight(275, 16)])
def test_a_token_attends_alike_alone_and_in_a_tile(sight, int8):
    """Bit for bit: which tokens share a tile is chosen by the step."""
    pages = Pages(300, 64, int8)
    queries = torch.randn(10, 3, 64).bfloat16()
    together = pages.attend("native", queries, sight)
    assert torch.equal(together[7:], pages.attend("native", queries[7:], sight))
    assert torch.equal(together[9:], pages.attend("native", queries[9:], sight))
