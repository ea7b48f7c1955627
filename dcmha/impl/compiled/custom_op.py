"""A call with many blocks as one custom operator, because a compiler would unroll the loop over blocks.

The backward pass recomputes each block.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim

import torch
from torch import Tensor

from ..call import AttentionCall, compute_dtype
from ..flatten import tensors_of, with_tensors
from ..operator import AttentionOperator, Functions
from .blocks import attend, attend_compiled, gradients, gradients_compiled
from .chunking import list_blocks


def attend_blocks(call: AttentionCall, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, T, D] block by block, and an empty tensor in place of statistics."""
    blocks = list_blocks(call, seed)
    out = torch.cat([(attend_compiled if block.q.is_cuda else attend)(block) for block in blocks], dim=2)
    return out, _no_statistics(call)


def gradients_of_blocks(
    d_out: Tensor, call: AttentionCall, seed: Tensor | None, statistics: Tensor, bias_gradient: bool
) -> list[Tensor]:
    """Compute the gradients of `tensors_of` a call that are not None, block by block."""
    tensors = tensors_of(call)
    sums = [None if x is None else torch.zeros_like(x, dtype=compute_dtype(x.dtype)) for x in tensors]
    places = list_blocks(with_tensors(call, sums), seed)  # the corresponding slices of the gradients
    start = 0
    for block, place in zip(list_blocks(call, seed), places, strict=True):
        stop = start + block.q.shape[2]
        found = (gradients_compiled if block.q.is_cuda else gradients)(block, d_out[:, :, start:stop])
        for total, part in zip((x for x in tensors_of(place) if x is not None), found, strict=True):
            total += part
        start = stop
    grads = [None if x is None else total.to(x.dtype) for x, total in zip(tensors, sums, strict=True)]
    return _wanted(grads, bias_gradient)


def _empty_output(call: AttentionCall) -> tuple[Tensor, Tensor]:
    return torch.empty_like(call.q, memory_format=torch.contiguous_format), _no_statistics(call)


def _empty_gradients(call: AttentionCall, bias_gradient: bool) -> list[Tensor]:
    tensors = _wanted(tensors_of(call), bias_gradient)
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors]


def _wanted(tensors: list[Tensor | None], bias_gradient: bool) -> list[Tensor]:
    """Return the tensors, in the order of `tensors_of`, that are not None; without the bias if it has no gradient."""
    return [x for x in (tensors if bias_gradient else tensors[:-1]) if x is not None]


def _no_statistics(call: AttentionCall) -> Tensor:
    return call.q.new_empty(0)


chunked_attention = AttentionOperator(
    "compiled_attention",
    "compiled",
    Functions(attend_blocks, gradients_of_blocks, _empty_output, _empty_gradients, prepare=lambda call: call),
    refused="second, compiled",
)
