"""A call with many blocks as one custom operator, because a compiler would unroll the loop over blocks.

The backward pass recomputes each block.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim

import torch
from torch import Tensor

from ..call import AttentionCall, compute_dtype, refuse_derivative
from ..masking import DocumentBounds
from .blocks import attend, attend_compiled, gradients, gradients_compiled, tensors_of, weights_from, with_tensors
from .chunking import list_blocks

PARTS = tuple(f"{side}_{part}" for side in ("query", "key") for part in ("down", "up", "gate")) + ("base",)
TENSORS = ("q", "k", "v", *(f"{c}_{part}" for c in ("pre", "post") for part in PARTS), "bias")  # differentiable
OTHERS = ("visible", "starts", "stops", "seed")
OPERANDS = ", ".join(f"Tensor{'?' * (name not in 'qkv')} {name}" for name in (*TENSORS, *OTHERS))
OPTIONS = "bool is_causal, SymInt window, float scale, float dropout_p, SymInt num_groups"
NUM_OPTIONS = 5


def opaque_attention(call: AttentionCall, seed: Tensor | None) -> Tensor:
    """Compute composed attention of a call that is being compiled: [B, H, T, D]."""
    starts, stops = (None, None) if call.document_ids is None else call.document_ids
    return _attend(
        *tensors_of(call),
        call.visible,
        starts,
        stops,
        seed,
        call.is_causal,
        call.window_size or 0,
        call.scale,
        call.dropout_p,
        call.num_groups,
    )


def _call(arguments: tuple) -> tuple[AttentionCall, Tensor | None]:
    """Reconstruct the call and the dropout seed from the operator's arguments."""
    *tensors, is_causal, window_size, scale, dropout_p, num_groups = arguments
    q, k, v, *weights, bias, visible, starts, stops, seed = tensors
    pre, post = weights_from(weights[: len(PARTS)]), weights_from(weights[len(PARTS) :])
    document_ids = None if starts is None else DocumentBounds(starts, stops)
    options = (is_causal, window_size or None, scale, dropout_p, num_groups)
    return AttentionCall(q, k, v, pre, post, visible, bias, document_ids, *options), seed


def attend_blocks(call: AttentionCall, seed: Tensor | None) -> Tensor:
    """Compute the output [B, H, T, D] block by block."""
    blocks = list_blocks(call, seed)
    return torch.cat([(attend_compiled if block.q.is_cuda else attend)(block) for block in blocks], dim=2)


def gradients_of_blocks(d_out: Tensor, call: AttentionCall, seed: Tensor | None) -> list[Tensor | None]:
    """Compute the gradients of a call's tensors, those of `tensors_of`, block by block."""
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
    return [None if x is None else total.to(x.dtype) for total, x in zip(sums, tensors, strict=True)]


@torch.library.custom_op("dcmha::chunked_attention", mutates_args=(), schema=f"({OPERANDS}, {OPTIONS}) -> Tensor")
def _attend(*arguments):
    """Compute the output [B, H, T, D]."""
    return attend_blocks(*_call(arguments))


@_attend.register_fake
def _(q, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "dcmha::chunked_attention_backward",
    mutates_args=(),
    schema=f"(Tensor d_out, {OPERANDS}, {OPTIONS}) -> Tensor[]",
)
def _attend_backward(d_out, *arguments):
    """Compute the gradients of all tensors except masks, indices and seeds; an empty tensor for those that are None."""
    found = gradients_of_blocks(d_out, *_call(arguments))
    return [d_out.new_empty(0) if grad is None else grad for grad in found]


@_attend_backward.register_fake
def _(d_out, *arguments):
    return [
        d_out.new_empty(0) if x is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        for x in arguments[: len(TENSORS)]
    ]


def _setup(ctx, inputs, output) -> None:
    ctx.options = inputs[-NUM_OPTIONS:]
    ctx.save_for_backward(*inputs[:-NUM_OPTIONS])


def _backward(ctx, d_out: Tensor):
    grads = _attend_backward(d_out, *ctx.saved_tensors, *ctx.options)
    given = [g if wanted else None for g, wanted in zip(grads, ctx.needs_input_grad, strict=False)]
    return *given, *(None,) * (len(OTHERS) + NUM_OPTIONS)


_attend.register_autograd(_backward, setup_context=_setup)
_attend_backward.register_autograd(lambda ctx, *grads: refuse_derivative("compiled", "second, compiled"))
