"""The fused implementation as an operator of torch: opaque to compilers, with its own gradient."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

import torch
from torch import Tensor

from ..call import refuse_derivative
from .launch import Operands, Options, backward, forward

OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? pre_query, Tensor? pre_key, Tensor? pre_base, Tensor? post_query, "
    "Tensor? post_key, Tensor? post_base, Tensor? key_mask"
)
OPTIONS = "bool is_causal, SymInt window, float scale, SymInt num_groups"
NUM_DIFFERENTIABLE = 9  # of the operands, all but the mask


@torch.library.custom_op(
    "dcmha::composed_attention", mutates_args=(), schema=f"({OPERANDS}, {OPTIONS}) -> (Tensor, Tensor)"
)
def composed(q, k, v, *rest):
    """Compute the output [B, H, T, D] and the base-2 log-sums of the composed scores [B, H, T]."""
    *operands, key_mask, is_causal, window, scale, num_groups = rest
    options = Options(is_causal, min(window, q.shape[2] + k.shape[2]), scale, num_groups)
    with torch.cuda.device_of(q):
        return forward(q.contiguous(), k.contiguous(), v.contiguous(), Operands(*operands), key_mask, options)


@composed.register_fake
def _(q, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "dcmha::composed_attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, {OPERANDS}, Tensor log_sum, {OPTIONS}) -> Tensor[]",
)
def composed_backward(d_out, q, k, v, *rest):
    """Compute the gradients of q, k, v and the six operands; empty tensors where there is none."""
    *operands, key_mask, log_sum, is_causal, window, scale, num_groups = rest
    options = Options(is_causal, min(window, q.shape[2] + k.shape[2]), scale, num_groups)
    tensors = (d_out.contiguous(), q.contiguous(), k.contiguous(), v.contiguous())
    with torch.cuda.device_of(q):
        dq, dk, dv, grads = backward(*tensors, Operands(*operands), key_mask, log_sum, options)
    packed = [q.new_empty(0) if g is None else g.to(w.dtype) for g, w in zip(grads, operands, strict=True)]
    return [dq, dk, dv, *packed]


@composed_backward.register_fake
def _(d_out, *rest):
    return [
        d_out.new_empty(0) if w is None else torch.empty_like(w, memory_format=torch.contiguous_format)
        for w in rest[:NUM_DIFFERENTIABLE]
    ]


def _setup(ctx, inputs, output) -> None:
    *tensors, is_causal, window, scale, num_groups = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.options = (is_causal, window, scale, num_groups)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, d_out: Tensor, _: Tensor | None):
    *tensors, log_sum = ctx.saved_tensors
    grads = composed_backward(d_out, *tensors, log_sum, *ctx.options)
    given = [None if w is None else g for w, g in zip(tensors[:NUM_DIFFERENTIABLE], grads, strict=True)]
    return *given, None, None, None, None, None


composed.register_autograd(_backward, setup_context=_setup)
composed_backward.register_autograd(lambda ctx, *grads: refuse_derivative("triton", "second"))
