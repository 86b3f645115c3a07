"""Norm, gate and rotary embedding against their formulas, odd shapes included."""

import pytest
import torch

from kernels.rms_norm import rms_norm, rms_norm_reference
from kernels.rotary_embedding import rotary_embedding_, rotary_embedding_reference, rotary_table
from kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference

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
