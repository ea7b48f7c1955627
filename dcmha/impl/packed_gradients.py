"""Gradients of compose weights as the GPU kernels return them: one tensor [B, tokens, 2R + gate, H] per side."""

# B batch, T query tokens, S key tokens, H heads, R compose rank

import torch
from torch import Tensor

from ..weights import ComposeWeights, SideWeights
from .call import AttentionCall


def packed_rows(side: SideWeights) -> int:
    """Number of packed rows of a side: 2R + gate."""
    return (0 if side.down is None else 2 * side.down.shape[2]) + (side.gate is not None)


def empty_gradients(call: AttentionCall, bias_gradient: bool) -> list[Tensor]:
    """Allocate the gradients of q, k, v, of the packed weights and bases that exist, and of the bias if requested."""
    q = call.q
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, call.k, call.v)]
    for weights in (call.pre or ComposeWeights(), call.post or ComposeWeights()):
        for side, tokens in ((weights.query, q.shape[2]), (weights.key, call.k.shape[2])):
            if (count := packed_rows(side)) > 0:
                grads.append(q.new_empty(q.shape[0], tokens, count, q.shape[1]))
        if weights.base is not None:
            grads.append(weights.base.new_empty(weights.base.shape))
    return [*grads, call.bias.new_empty(call.bias.shape)] if bias_gradient else grads


def unpack_gradients(grads: list[Tensor], call: AttentionCall) -> list[Tensor | None]:
    """Assign the gradients, in the order of `empty_gradients`, to `tensors_of` the call."""
    given = iter(grads)
    result = [next(given), next(given), next(given)]
    for weights in (call.pre or ComposeWeights(), call.post or ComposeWeights()):
        for side in (weights.query, weights.key):
            result += _unpack(next(given) if packed_rows(side) else None, side)
        result.append(None if weights.base is None else next(given))
    return [*result, next(given, None)]


def _unpack(packed: Tensor | None, side: SideWeights) -> SideWeights:
    """Split the packed gradients of a side; None if it has no rows."""
    rank = 0 if side.down is None else side.down.shape[2]
    gate = None if side.gate is None else packed[:, :, 2 * rank]
    if rank == 0:
        return SideWeights(*(None if x is None else torch.zeros_like(x) for x in (side.down, side.up)), gate)
    return SideWeights(packed[:, :, :rank], packed[:, :, rank : 2 * rank], gate)
