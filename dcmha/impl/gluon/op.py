"""PyTorch operator of the kernels, with its gradient."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from typing import NamedTuple

import torch
from torch import Tensor

from ...weights import ComposeWeights, SideWeights
from ..call import AttentionCall, is_watched, refuse_derivative
from ..compiled.blocks import flat_weights, weights_from
from .backward import backward
from .call import Attention, lse_shape
from .forward import forward
from .masking import masks_of

PARTS = ("query_down", "query_up", "query_gate", "key_down", "key_up", "key_gate", "base")
WEIGHTS = [f"{composition}_{part}" for composition in ("pre", "post") for part in PARTS]
OPTIONAL = [*WEIGHTS, "mask", "starts", "stops", "seed"]
TENSORS = f"Tensor q, Tensor k, Tensor v, {', '.join(f'Tensor? {name}' for name in OPTIONAL)}"
OPTIONS = "bool is_causal, SymInt window, float scale, float dropout_p, SymInt num_groups"
NUM_TENSORS, NUM_OPTIONS = 3 + len(OPTIONAL), 5
MASK = 3 + len(WEIGHTS)  # its place among the tensors


class Arguments(NamedTuple):
    """Arguments of the operator after q, k and v; a window of 0 means none."""

    pre: ComposeWeights | None
    post: ComposeWeights | None
    mask: Tensor | None
    starts: Tensor | None
    stops: Tensor | None
    seed: Tensor | None
    is_causal: bool
    window_size: int
    scale: float
    dropout_p: float
    num_groups: int


def arguments_from(rest: tuple) -> Arguments:
    """Build `Arguments` from tensors and options in the order of the schema."""
    count = len(PARTS)
    return Arguments(weights_from(rest[:count]), weights_from(rest[count : 2 * count]), *rest[2 * count :])


def _attention(
    q: Tensor, k: Tensor, v: Tensor, rest: tuple, lse: Tensor | None = None, mask_gradient: bool = False
) -> Attention:
    a = arguments_from(rest)
    if a.mask is not None and a.mask.dtype not in (torch.bool, q.dtype):
        raise ValueError(f"mask has dtype {a.mask.dtype}; expected torch.bool, or the dtype of q, {q.dtype}.")
    masks = masks_of(a.mask, a.starts, a.stops, a.seed, a.dropout_p)
    shape = tuple(a.mask.shape) if mask_gradient else None
    return Attention(q, k, v, a.pre, a.post, masks, a.is_causal, a.window_size, a.scale, a.num_groups, shape, lse)


def compute(q: Tensor, k: Tensor, v: Tensor, *rest) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, T, D] and the base-2 log-sum-exps of the composed scores, of `lse_shape`.

    q, k and v are contiguous.
    """
    with torch.cuda.device_of(q):
        return forward(_attention(q, k, v, rest))


def compute_gradients(d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest) -> list[Tensor]:
    """Compute the gradients of q, k, v, packed weights and bases, and the mask if requested, without those of None."""
    *rest, lse, mask_gradient = rest
    with torch.cuda.device_of(q):
        call = _attention(q, k, v, tuple(rest), lse, mask_gradient)
        return [grad for grad in backward(call, d_out.contiguous()) if grad is not None]


composed = torch.library.custom_op(
    "dcmha::composed_attention_16bit", compute, mutates_args=(), schema=f"({TENSORS}, {OPTIONS}) -> (Tensor, Tensor)"
)
composed_backward = torch.library.custom_op(
    "dcmha::composed_attention_16bit_backward",
    compute_gradients,
    mutates_args=(),
    schema=f"(Tensor d_out, {TENSORS}, {OPTIONS}, Tensor lse, bool mask_gradient) -> Tensor[]",
)


@composed.register_fake
def _(q, k, v, *rest):
    a = arguments_from(rest)
    lse = q.new_empty(lse_shape(q, a.num_groups, a.mask), dtype=torch.float32)
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@composed_backward.register_fake
def _(d_out, q, k, v, *rest):
    *rest, _, mask_gradient = rest
    a = arguments_from(tuple(rest))
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    for weights in (a.pre or ComposeWeights(), a.post or ComposeWeights()):
        for side, tokens in ((weights.query, q.shape[2]), (weights.key, k.shape[2])):
            if (count := count_of(side)) > 0:
                grads.append(q.new_empty(q.shape[0], tokens, count, q.shape[1]))
        if weights.base is not None:
            grads.append(weights.base.new_empty(weights.base.shape))
    return [*grads, a.mask.new_empty(a.mask.shape)] if mask_gradient else grads


def count_of(side: SideWeights) -> int:
    """Number of packed rows of a side: 2R + gate."""
    return (0 if side.down is None else 2 * side.down.shape[2]) + (side.gate is not None)


def unpack(packed: Tensor | None, side: SideWeights) -> SideWeights:
    """Split the packed gradients of a side's weights, [B, tokens, 2R + gate, H]; None if `count_of` the side is 0."""
    rank = 0 if side.down is None else side.down.shape[2]
    down, up = (packed[:, :, :rank], packed[:, :, rank : 2 * rank]) if rank else (side.down, side.up)  # empty or None
    return SideWeights(down, up, None if side.gate is None else packed[:, :, 2 * rank])


def gradients_of_tensors(grads: list[Tensor], pre: ComposeWeights | None, post: ComposeWeights | None) -> list:
    """Assign the results of `compute_gradients` to q, k, v, all `WEIGHTS` and the mask; None if there is none."""
    given = iter(grads)
    result = [next(given), next(given), next(given)]
    for weights in (pre or ComposeWeights(), post or ComposeWeights()):
        for side in (weights.query, weights.key):
            result += unpack(next(given) if count_of(side) else None, side)
        result.append(None if weights.base is None else next(given))
    return [*result, next(given, None)]


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:NUM_TENSORS], output[1])
    ctx.options = inputs[NUM_TENSORS:]
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, d_out: Tensor, _: Tensor | None):
    *tensors, lse = ctx.saved_tensors
    mask_gradient = tensors[MASK] is not None and ctx.needs_input_grad[MASK]
    run = composed_backward if torch.is_grad_enabled() or is_watched(d_out, *tensors) else compute_gradients
    grads = run(d_out, *tensors, *ctx.options, lse, mask_gradient)
    a = arguments_from((*tensors[3:], *ctx.options))
    return *gradients_of_tensors(grads, a.pre, a.post), *(None,) * (NUM_TENSORS - MASK - 1 + NUM_OPTIONS)


composed.register_autograd(_backward, setup_context=_setup)
composed_backward.register_autograd(lambda ctx, *grads: refuse_derivative("triton", "second"))


class EagerAttention(torch.autograd.Function):
    """The operator for eager mode, where a custom operator costs more host time than the launches of a call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = (composed if is_watched(*inputs[:NUM_TENSORS]) else compute)(*inputs)
        _setup(ctx, inputs, output)
        return output

    backward = staticmethod(_backward)


def attention(call: AttentionCall, seed: Tensor | None) -> Tensor:
    """Compute composed attention [B, H, T, D]; `seed` is the dropout seed."""
    run = composed if torch.compiler.is_compiling() else EagerAttention.apply
    return run(*_arguments(call, seed))[0]


def _arguments(call: AttentionCall, seed: Tensor | None) -> tuple:
    tensors = (*(x.contiguous() for x in (call.q, call.k, call.v)), *flat_weights(call.pre), *flat_weights(call.post))
    options = (call.is_causal, call.window_size or 0, call.scale, call.dropout_p, call.num_groups)
    return *tensors, call.mask, *call.document_bounds, seed, *options


def solve(call: AttentionCall, seed: Tensor | None, d_out: Tensor | None) -> list[Tensor | None]:
    """Compute the output and, given its gradient, the gradients of `tensors_of` the call, without autograd."""
    arguments = _arguments(call, seed)
    out, lse = compute(*arguments)
    if d_out is None:
        return [out]
    grads = compute_gradients(d_out, *arguments, lse, call.bias is not None)
    return [out, *gradients_of_tensors(grads, call.pre, call.post)]
