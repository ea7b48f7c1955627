"""PyTorch operator of the fused implementation, with its gradient."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

import torch
from torch import Tensor

from ...weights import ComposeWeights
from ..call import AttentionCall, refuse_derivative
from ..compiled.blocks import flat_weights
from .chunked import backward, forward
from .packing import CallOptions, ComposeOperands, MaskOperands, pack

OPERANDS = (
    "Tensor q, Tensor k, Tensor v, Tensor? pre_query, Tensor? pre_key, Tensor? pre_base, Tensor? post_query, "
    "Tensor? post_key, Tensor? post_base, Tensor? mask, Tensor? starts, Tensor? stops, Tensor? seed"
)
OPTIONS = "bool is_causal, SymInt window, float scale, float dropout_p, SymInt num_groups"
NUM_OPTIONS = 5
NUM_MASK_OPERANDS = 4  # the last operands
NUM_WEIGHTS = 6  # the operands before them


@torch.library.custom_op(
    "dcmha::composed_attention", mutates_args=(), schema=f"({OPERANDS}, {OPTIONS}) -> (Tensor, Tensor)"
)
def composed(q, k, v, *rest):
    """Compute the output [B, H, T, D] and the base-2 log-sum-exp of the composed scores [B, H, T]."""
    weights, mask_operands, options = _split(q, k, rest)
    with torch.cuda.device_of(q):
        return forward(q.contiguous(), k.contiguous(), v.contiguous(), weights, mask_operands, options)


def _split(q: Tensor, k: Tensor, rest: tuple) -> tuple[ComposeOperands, MaskOperands, CallOptions]:
    """Split the operator's arguments after q, k and v."""
    is_causal, window_size, scale, dropout_p, num_groups = rest[-NUM_OPTIONS:]
    options = CallOptions(is_causal, min(window_size, q.shape[2] + k.shape[2]), scale, dropout_p, num_groups)
    return (
        ComposeOperands(*rest[:NUM_WEIGHTS]),
        MaskOperands(*rest[NUM_WEIGHTS : NUM_WEIGHTS + NUM_MASK_OPERANDS]),
        options,
    )


@composed.register_fake
def _(q, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op(
    "dcmha::composed_attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, {OPERANDS}, {OPTIONS}, Tensor lse, bool mask_gradient) -> Tensor[]",
)
def composed_backward(d_out, q, k, v, *rest):
    """Compute the gradients of q, k, v, the six operands and the mask; an empty tensor for those without a gradient."""
    *rest, lse, mask_gradient = rest
    weights, mask_operands, options = _split(q, k, tuple(rest))
    tensors = (d_out.contiguous(), q.contiguous(), k.contiguous(), v.contiguous())
    with torch.cuda.device_of(q):
        grads = backward(*tensors, weights, mask_operands, lse, options, mask_gradient)
    of_weights = [q.new_empty(0) if g is None else g.to(w.dtype) for g, w in zip(grads.operands, weights, strict=True)]
    return [
        grads.q,
        grads.k,
        grads.v,
        *of_weights,
        grads.mask.to(mask_operands.mask.dtype) if mask_gradient else q.new_empty(0),
    ]


@composed_backward.register_fake
def _(d_out, q, k, v, *rest):
    weights, mask, mask_gradient = rest[:NUM_WEIGHTS], rest[NUM_WEIGHTS], rest[-1]
    return [
        d_out.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in (q, k, v, *weights, mask if mask_gradient else None)
    ]


def _setup(ctx, inputs, output) -> None:
    tensors, ctx.options = inputs[:-NUM_OPTIONS], inputs[-NUM_OPTIONS:]
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, d_out: Tensor, _: Tensor | None):
    *tensors, lse = ctx.saved_tensors
    mask_gradient = ctx.needs_input_grad[3 + NUM_WEIGHTS]
    *grads, d_mask = composed_backward(d_out, *tensors, *ctx.options, lse, mask_gradient)
    given = [None if w is None else g for w, g in zip(tensors[: 3 + NUM_WEIGHTS], grads, strict=True)]
    return *given, d_mask if mask_gradient else None, *(None,) * (NUM_MASK_OPERANDS - 1 + NUM_OPTIONS)


composed.register_autograd(_backward, setup_context=_setup)
composed_backward.register_autograd(lambda ctx, *grads: refuse_derivative("triton", "second"))


def attention(call: AttentionCall, seed: Tensor | None) -> Tensor:
    """Compute composed attention [B, H, T, D]; `seed` is the dropout seed."""
    return composed(*_arguments(call, seed))[0]


def _arguments(call: AttentionCall, seed: Tensor | None) -> tuple:
    operands = [operand for weights in (call.pre, call.post) for operand in _operands(weights)]
    options = (call.is_causal, call.window_size or 0, call.scale, call.dropout_p, call.num_groups)
    return call.q, call.k, call.v, *operands, call.mask, *call.document_bounds, seed, *options


def _operands(weights: ComposeWeights | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the packed query side, the packed key side, and the base of a composition."""
    if weights is None:
        return None, None, None
    return pack(weights.query), pack(weights.key), weights.base


def solve(call: AttentionCall, seed: Tensor | None, d_out: Tensor | None) -> list[Tensor | None]:
    """Compute the output and, given its gradient, the gradients of `tensors_of` the call, without autograd."""
    arguments = _arguments(call, seed)
    out, lse = composed(*arguments)
    if d_out is None:
        return [out]
    has_bias = call.bias is not None
    *grads, d_mask = composed_backward(d_out, *arguments, lse, has_bias)
    operands = ComposeOperands(*(None if grad.numel() == 0 else grad for grad in grads[3:]))
    weights = [w for name in ("pre", "post") for w in flat_weights(operands.weights(name))]
    return [out, *grads[:3], *weights, d_mask if has_bias else None]
