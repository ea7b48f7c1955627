"""Rotary embedding: complex multiplication, partial rotation, positions per batch row, relative scores and dtypes."""

import pytest
import torch

from dcmha import rotary_embedding


@pytest.mark.parametrize("rotary_dim", [8, 4])
def test_rotary_embedding_equals_complex_multiplication(rotary_dim):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 8, dtype=torch.float64), torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 100, 2, 0]])
    half = rotary_dim // 2
    frequency = 50.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turn = torch.polar(torch.ones(2, 1, 5, half, dtype=torch.float64), positions[:, None, :, None] * frequency)
    for x, got in zip((q, k), rotary_embedding(positions, rotary_dim, 50.0, torch.float64)(q, k), strict=True):
        expected = torch.complex(x[..., :half], x[..., half:rotary_dim]) * turn
        torch.testing.assert_close(got[..., :rotary_dim], torch.cat([expected.real, expected.imag], -1))
        assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


def test_scores_depend_only_on_relative_positions():
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 6, 16, dtype=torch.float64), torch.randn(1, 1, 6, 16, dtype=torch.float64)
    near, far = (rotary_embedding(torch.arange(6) + start, 16, dtype=torch.float64)(q, k) for start in (0, 1000))
    torch.testing.assert_close(near[0] @ near[1].mT, far[0] @ far[1].mT)
    assert not torch.allclose(near[0], far[0])


def test_input_dtype_is_preserved_and_angles_are_float32():
    q = torch.randn(1, 1, 3, 8, dtype=torch.bfloat16)
    positions = torch.tensor([0, 1, 2000])
    got, _ = rotary_embedding(positions, 8)(q, q)
    exact, _ = rotary_embedding(positions, 8, dtype=torch.float64)(q.double(), q.double())
    assert got.dtype == torch.bfloat16
    assert (got - exact).abs().max() < 2**-7  # half a unit in the last place of bfloat16 values below 4


@pytest.mark.parametrize("rotary_dim", [0, 3, -2])
def test_invalid_rotary_dim_raises_error(rotary_dim):
    with pytest.raises(ValueError, match=f"rotary_dim={rotary_dim} must be a positive even number"):
        rotary_embedding(torch.arange(3), rotary_dim)
