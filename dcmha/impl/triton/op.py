"""PyTorch operator of the Triton kernels, with its gradient."""

# B batch, T query tokens, S key tokens, H heads, D head dim

import torch
from torch import Tensor

from ..call import AttentionCall
from ..flatten import with_one_mask
from ..operator import AttentionOperator, Functions
from ..packed_gradients import empty_gradients, unpack_gradients
from .chunked import backward, forward
from .packing import CallOptions, ComposeOperands, MaskOperands, pack_call


def _operands(call: AttentionCall, seed: Tensor | None) -> tuple[ComposeOperands, MaskOperands, CallOptions]:
    """Operands of the kernels besides q, k and v, for a call with one mask."""
    window_size = min(call.window_size or 0, call.q.shape[2] + call.k.shape[2])
    options = CallOptions(call.is_causal, window_size, call.scale, call.dropout_p, call.num_groups)
    return pack_call(call.pre, call.post), MaskOperands(call.mask, *call.document_bounds, seed), options


def _forward(call: AttentionCall, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the output and the base-2 log-sum-exp of the composed scores [B, H, T]."""
    tensors = (x.contiguous() for x in (call.q, call.k, call.v))
    with torch.cuda.device_of(call.q):
        return forward(*tensors, *_operands(call, seed))


def _backward(
    d_out: Tensor, call: AttentionCall, seed: Tensor | None, lse: Tensor, mask_gradient: bool
) -> list[Tensor]:
    tensors = (x.contiguous() for x in (d_out, call.q, call.k, call.v))
    weights, mask_operands, options = _operands(call, seed)
    with torch.cuda.device_of(call.q):
        grads = backward(*tensors, weights, mask_operands, lse, options, mask_gradient)
    return [g.to(call.q.dtype) for g in (grads.q, grads.k, grads.v, *grads.operands, grads.mask) if g is not None]


def _empty_output(call: AttentionCall) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
    return out, call.q.new_empty(call.q.shape[:3], dtype=torch.float32)


attention = AttentionOperator(
    "triton_attention",
    "triton",
    Functions(_forward, _backward, _empty_output, empty_gradients, with_one_mask, unpack_gradients),
)
