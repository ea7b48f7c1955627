"""PyTorch operator of the kernels, with its gradient."""

# B batch, T query tokens, S key tokens, H heads, D head dim

import torch
from torch import Tensor

from ..call import AttentionCall
from ..flatten import with_one_mask
from ..operator import AttentionOperator, Functions
from ..packed_gradients import empty_gradients, unpack_gradients
from .backward import backward
from .call import Attention, lse_shape
from .forward import forward
from .masking import masks_of


def attention_of(
    call: AttentionCall, seed: Tensor | None, lse: Tensor | None = None, mask_gradient: bool = False
) -> Attention:
    """Build the `Attention` of a call with one mask, whose q, k and v are contiguous.

    Raises:
        ValueError: If the dtype of a floating mask is not that of q.
    """
    mask = call.mask
    if mask is not None and mask.dtype not in (torch.bool, call.q.dtype):
        raise ValueError(f"mask has dtype {mask.dtype}; expected torch.bool, or the dtype of q, {call.q.dtype}.")
    masks = masks_of(mask, *call.document_bounds, seed, call.dropout_p)
    shape = tuple(mask.shape) if mask_gradient else None
    options = (call.is_causal, call.window_size or 0, call.scale, call.num_groups)
    return Attention(call.q, call.k, call.v, call.pre, call.post, masks, *options, shape, lse)


def _prepare(call: AttentionCall) -> AttentionCall:
    return with_one_mask(call._replace(q=call.q.contiguous(), k=call.k.contiguous(), v=call.v.contiguous()))


def _forward(call: AttentionCall, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the output and the base-2 log-sum-exps of the composed scores, of `lse_shape`."""
    with torch.cuda.device_of(call.q):
        return forward(attention_of(call, seed))


def _backward(
    d_out: Tensor, call: AttentionCall, seed: Tensor | None, lse: Tensor, mask_gradient: bool
) -> list[Tensor]:
    with torch.cuda.device_of(call.q):
        grads = backward(attention_of(call, seed, lse, mask_gradient), d_out.contiguous())
    return [grad for grad in grads if grad is not None]


def _empty_output(call: AttentionCall) -> tuple[Tensor, Tensor]:
    shape = lse_shape(call.q, call.num_groups, call.mask)
    out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
    return out, call.q.new_empty(shape, dtype=torch.float32)


attention = AttentionOperator(
    "gluon_attention",
    "triton",
    Functions(_forward, _backward, _empty_output, empty_gradients, _prepare, unpack_gradients),
)
