"""Norm, gate and rotary embedding against their formulas, odd shapes included."""

import pytest
import torch

from kernels.gated import (
    gelu_and_mul,
    gelu_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
)
from kernels.rms_norm import rms_norm, rms_norm_reference
from kernels.rotary_embedding import rotary_embedding_, rotary_embedding_reference, rotary_table
from kernels.softcap import softcap

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)]


@pytest.mark.parametrize("shape", [(1, 576), (5, 123), (33, 7)])
def test_rms_norm_is_its_formula(shape):
    x, weight = torch.randn(shape) * 3, torch.randn(shape[1])
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@pytest.mark.parametrize("rows", [1, 2, 7, 32])
def test_rms_norm_of_a_row_is_bitwise_the_same_in_every_batch(rows):
    x, weight = torch.randn(300, 576), torch.randn(576)
    assert torch.equal(rms_norm(x[:rows], weight, 1e-5), rms_norm(x, weight, 1e-5)[:rows])


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 3072), (5, 246), (33, 14)])
def test_silu_and_mul_is_its_formula(shape, dtype, tolerance):
    gate_up = torch.randn(shape).to(dtype)
    torch.testing.assert_close(
        silu_and_mul(gate_up), silu_and_mul_reference(gate_up), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("shape", [(1, 3072), (5, 246), (33, 14)])
def test_gelu_and_mul_is_its_formula(shape, dtype, tolerance):
    gate_up = torch.randn(shape).to(dtype)
    torch.testing.assert_close(
        gelu_and_mul(gate_up), gelu_and_mul_reference(gate_up), atol=tolerance, rtol=tolerance
    )


def test_a_soft_cap_bends_large_values_only():
    x = torch.tensor([0.0, 0.01, -0.01, 30.0, -1e9])
    expected = torch.tensor([0.0, 0.01, -0.01, 30 * 0.76159416, -30.0])
    torch.testing.assert_close(softcap(x, 30.0), expected)
    assert softcap(x, 0.0) is x


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("rows", "heads", "head_dim"), [(1, 12, 64), (7, 3, 8), (5, 1, 2)])
def test_rotary_embedding_turns_pairs_by_position(rows, heads, head_dim, dtype, tolerance):
    """Far positions too: row r stands at position 997 * r."""
    frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    positions = torch.arange(rows) * 997
    factors = rotary_table(frequencies, int(positions[-1]) + 1)[positions]
    x = torch.randn(rows, heads, head_dim).to(dtype)
    angles = torch.outer(positions.double(), frequencies).float()
    expected = rotary_embedding_reference(x, angles)
    rotary_embedding_(x, factors)
    torch.testing.assert_close(x, expected, atol=tolerance * 5, rtol=tolerance)


def test_dims_beyond_the_table_are_not_turned():
    x = torch.randn(3, 2, 20)
    whole, part = x.clone(), x[..., :12].clone()
    factors = rotary_table(torch.rand(6), 3)
    rotary_embedding_(whole, factors)
    rotary_embedding_(part, factors)
    assert torch.equal(whole, torch.cat((part, x[..., 12:]), dim=-1))
