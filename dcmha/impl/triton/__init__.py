"""Composed attention in Triton kernels that only mix heads, with library products between them.

Nothing of size T x S is kept: queries are worked through in chunks on a workspace of fixed size, forward and backward.
Imported only when `impl="triton"` is chosen. `TRITON_INTERPRET=1` in the environment before the first use makes it run
on CPU tensors.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

import torch
from torch import Tensor

from ...weights import ComposeWeights, SideWeights
from ..call import Call
from .op import composed


def attention(call: Call) -> Tensor:
    """Compute composed attention, of a call that `why_not_triton` lets pass: [B, H, T, D]."""
    q, k, v, pre, post, visible, _, is_causal, window, scale, _, num_groups = call
    key_mask = None
    if visible is not None:
        key_mask = visible.expand(q.shape[0], 1, 1, k.shape[2])[:, 0, 0].to(torch.uint8).contiguous()
    operands = [operand for weights in (pre, post) for operand in _operands(weights)]
    return composed(q, k, v, *operands, key_mask, is_causal, window or 0, scale, num_groups)[0]


def _operands(weights: ComposeWeights | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Pack the query side, the key side, and give the base of a composition."""
    if weights is None:
        return None, None, None
    return _pack(weights.query), _pack(weights.key), weights.base


def _pack(side: SideWeights) -> Tensor | None:
    """Put one side's weights into one tensor [B, T or S, 2R + gate, H]."""
    gate = side.gate if side.gate is None else side.gate.unsqueeze(2)
    parts = [part for part in (side.down, side.up, gate) if part is not None]
    return torch.cat(parts, 2) if parts else None
