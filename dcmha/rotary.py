"""Rotary position embedding (Su et al., 2021) in the half ("NeoX") convention, over all or the first channels.

Channel j is paired with j + rotary_dim / 2 and turned by position * base^(-2j / rotary_dim); the other channels pass.
"""

# B batch, T query tokens, H heads, D head dim

import torch
from torch import Tensor

from .attention import Rope


def rotary_embedding(
    positions: Tensor, rotary_dim: int, base: float = 10000.0, dtype: torch.dtype | None = None
) -> Rope:
    """Make the rotation of queries and keys for tokens at given positions.

    Args:
        positions: Integer positions [T], or [B, T] where rows differ.
        rotary_dim: Channels that turn, the first of each head; even.
        base: Base of the geometric series of frequencies.
        dtype: Dtype of the angles; float32 if None. The rotation is done in it (or in the input's, if wider).

    Returns:
        A callable that takes q and k, [B, H, T, D] with D >= rotary_dim, and returns them rotated, dtypes unchanged.

    Raises:
        ValueError: If `rotary_dim` is not a positive even number.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim} must be a positive even number.")
    dtype = dtype or torch.float32
    exponents = torch.arange(0, rotary_dim, 2, dtype=dtype, device=positions.device) / rotary_dim
    angles = positions[..., None].to(dtype) * base**-exponents  # [(B,) T, rotary_dim / 2]
    angles = angles.unsqueeze(-3)  # one for all heads
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        first, second = x[..., :rotary_dim].chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
        return turned if rotary_dim == x.shape[-1] else torch.cat([turned, x[..., rotary_dim:]], -1)

    return lambda q, k: (rotate(q), rotate(k))
