import pytest
import torch

from kernels.linear import Linear, linear_reference

SHAPES = [(960, 576), (576, 1536), (97, 33), (1, 16)]  # [out, in]


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 5, 32])
def test_agrees_with_the_formula(shape, rows, dtype, atol):
    """The packed product is the product, up to the rounding of its dtype."""
    weight, x = torch.randn(shape).to(dtype), torch.randn(rows, shape[1]).to(dtype)
    exact = linear_reference(x.double(), weight.double())
    torch.testing.assert_close(Linear(weight)(x).double(), exact, atol=atol, rtol=1e-2)


@pytest.mark.parametrize("shape", [(960, 576), (3072, 576), (576, 1536), (1024, 2048)])
def test_a_row_in_fp32_is_bitwise_the_same_in_every_batch(shape):
    """What a token computes does not depend on which tokens share its step."""
    linear, x = Linear(torch.randn(shape)), torch.randn(300, shape[1])
    whole = linear(x)
    for rows in (1, 2, 3, 7, 15, 16, 17, 31, 64, 127, 128, 255):
        assert torch.equal(linear(x[:rows]), whole[:rows]), rows
        assert torch.equal(linear(x[-rows:]), whole[-rows:]), rows


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.3)], ids=["fp32", "bf16"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_bias_is_added_and_a_row_stays_the_same_in_every_batch(shape, dtype, atol):
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    x = torch.randn(40, shape[1]).to(dtype)
    linear = Linear(weight, bias)
    whole = linear(x)
    exact = linear_reference(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(whole.double(), exact, atol=atol, rtol=1e-2)
    if dtype == torch.float32:
        for rows in (1, 2, 3, 15, 16, 17):
            assert torch.equal(linear(x[:rows]), whole[:rows]), rows
