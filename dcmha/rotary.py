"""Rotary position embedding (Su et al., 2021) in the half ("NeoX") convention, over all or the first channels.

Channel j is paired with j + rotary_dim / 2 and rotated by position * base^(-2j / rotary_dim); channels beyond
rotary_dim are unchanged.
"""

# B batch, T query tokens, H heads, D head dim

import torch
from torch import Tensor

from .attention import Rope
from .checks import check_factory, check_numbers, is_integer

MIN_BASE = 1e-6
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def rotary_embedding(
    positions: Tensor, rotary_dim: int, base: float = 10000.0, dtype: torch.dtype | None = None
) -> Rope:
    """Create the rotation of queries and keys for tokens at given positions.

    Args:
        positions: Integer positions [T], or [B, T] if rows differ.
        rotary_dim: Number of rotated channels, the first of each head; even.
        base: Base of the geometric series of frequencies.
        dtype: Dtype of the angles; float32 if None. The rotation is computed in it, or in the input's dtype if wider.

    Returns:
        A callable that rotates q and k, [B, H, T, D] with D >= rotary_dim; dtypes are unchanged.

    Raises:
        ValueError: If `positions` are not integers of one or two axes, `rotary_dim` is not a positive even number,
            `base` is not positive and finite, or `dtype` is not floating; in the call, if q or k has fewer channels, or
            a different number of rows or tokens than `positions`.
    """
    if not isinstance(positions, Tensor) or positions.dim() not in (1, 2) or positions.dtype not in INTEGERS:
        is_tensor = isinstance(positions, Tensor)
        got = f"{positions.dtype} {list(positions.shape)}" if is_tensor else type(positions).__name__
        raise ValueError(f"positions is {got}: expected integers [T], or [B, T].")
    if not is_integer(rotary_dim) or rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim!r} must be a positive even number.")
    check_numbers(low=MIN_BASE, base=base)
    check_factory(None, dtype)
    dtype = dtype or torch.float32
    exponents = torch.arange(0, rotary_dim, 2, dtype=dtype, device=positions.device) / rotary_dim
    angles = positions[..., None].to(dtype) * base**-exponents  # [(B,) T, rotary_dim / 2]
    angles = angles.unsqueeze(-3)  # one for all heads
    cos, sin = angles.cos(), angles.sin()

    def rotate(x: Tensor) -> Tensor:
        has_other_rows = positions.dim() == 2 and positions.shape[0] not in (1, x.shape[0])
        if x.shape[-1] < rotary_dim or x.shape[-2] != positions.shape[-1] or has_other_rows:
            got = f"positions of shape {list(positions.shape)}, rotary_dim={rotary_dim}"
            raise ValueError(f"x has shape {list(x.shape)}; accepted for {got}: [B, H, T, D] of those rows and tokens.")
        first, second = x[..., :rotary_dim].chunk(2, -1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
        return turned if rotary_dim == x.shape[-1] else torch.cat([turned, x[..., rotary_dim:]], -1)

    return lambda q, k: (rotate(q), rotate(k))
