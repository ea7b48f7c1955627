"""PyTorch operator around the C++ library, with its gradient."""

# B batch, T query tokens, S key tokens, H heads, D head dim, G head groups

import torch
from torch import Tensor

from ...weights import ComposeWeights, SideWeights
from ..call import is_watched, ranks_of, refuse_derivative
from .arguments import (
    BACKWARD,
    BASE,
    FORWARD,
    KEY_WEIGHTS,
    WEIGHTS,
    CallOptions,
    Weights,
    WorkSplit,
    compositions,
    dense,
    full_rows,
    mask_strides,
    matrix,
    share,
    share_keys,
)
from .library import load

NAMES = [f"{side}_{part}" for side in ("query", "key") for part in SideWeights._fields] + ["base"]
WEIGHT_NAMES = [f"{composition}_{name}" for composition in ("pre", "post") for name in NAMES]
OPERANDS = (
    f"Tensor q, Tensor k, Tensor v, {', '.join(f'Tensor? {n}' for n in WEIGHT_NAMES)}, Tensor? bias, Tensor? visible"
)
NUM_OPERANDS = 3 + len(WEIGHT_NAMES) + 2
OPTIONS = "bool is_causal, SymInt window, float scale, SymInt num_groups"

# Cached compiled graphs of torch survive an upgrade of this package and identify an operator by name only. Increment
# the number in the name whenever the shapes, strides or dtypes of the operator's results change.
NAME = "dcmha::cpu_attention_2"


class _Tensors:
    """Operands of a call in the form that the C++ expects; owns their memory."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, *rest: Tensor | None) -> None:
        *weights, bias, visible = rest
        S = k.shape[2]
        self.q, self.k, self.v, *self.weights = map(dense, (q, k, v, *weights))
        for base in (BASE, WEIGHTS + BASE):
            self.weights[base] = None if weights[base] is None else self.weights[base].contiguous()
        self.bias, self.visible = full_rows(bias, S), full_rows(visible, S)
        self.library = load(ranks_of(*map(_composition, (weights[:WEIGHTS], weights[WEIGHTS:]))))

    def call(
        self,
        split: WorkSplit,
        options: CallOptions,
        out: Tensor,
        softmax: Tensor,
        sums: Tensor | None,
        backward: bytes = b"",
    ) -> None:
        """Call the C++ function."""
        (B, H, T, D), S = self.q.shape, self.k.shape[2]
        is_causal, window_size, scale, num_groups = options
        values = FORWARD.pack(
            *(B, H, num_groups, H // self.k.shape[1], T, S, D, *split, is_causal, min(window_size, T + S), scale),
            *(*matrix(self.q), *matrix(self.k), *matrix(self.v), *matrix(out)),
            *(softmax.data_ptr(), 0 if sums is None else sums.data_ptr()),
            *(*compositions(self.weights), *mask_strides(self.visible), *mask_strides(self.bias)),
        )
        if self.library.composed_attention(values + (backward or bytes(BACKWARD.size)), bool(backward)):
            raise MemoryError(
                f"composed attention of q {list(self.q.shape)} and k {list(self.k.shape)}: out of memory."
            )

    def count_blocks(self) -> int:
        """Number of blocks of queries per batch row."""
        return self.library.count_blocks(self.q.shape[2])


def _composition(weights: Weights) -> ComposeWeights:
    return ComposeWeights(SideWeights(*weights[:3]), SideWeights(*weights[3:6]), weights[BASE])


def _by_token(x: Tensor, B: int | None = None) -> Tensor:
    """Allocate float32 [B, H, T, D] like x, with tokens before heads in memory, as the layer's projections expect."""
    rows, H, T, D = x.shape
    return x.new_empty(B or rows, T, H, D, dtype=torch.float32).transpose(1, 2)


def _forward(q, *rest):
    """Compute the output [B, H, T, D], and per row the maximum score and the inverse softmax sum [B, H, T, 2]."""
    tensors, options = _Tensors(q, *rest[: -len(CallOptions._fields)]), CallOptions(*rest[-len(CallOptions._fields) :])
    B, split = len(q), share_keys(len(q), tensors.count_blocks(), rest[0].shape[2])
    out, softmax = _by_token(q, split.shares * B), q.new_empty(*q.shape[:3], 2, dtype=torch.float32)
    sums = q.new_empty(split.shares, *q.shape[:3], 2, dtype=torch.float32) if split.shares > 1 else None
    tensors.call(split, options, out, softmax, sums)
    return _add_rows(out, B).to(q.dtype), softmax


composed = torch.library.custom_op(
    NAME, _forward, mutates_args=(), schema=f"({OPERANDS}, {OPTIONS}) -> (Tensor, Tensor)"
)


@composed.register_fake
def _(q, *rest):
    return _by_token(q).to(q.dtype), q.new_empty(*q.shape[:3], 2, dtype=torch.float32)


def _backward(d_out, softmax, of_bias, q, k, v, *rest):
    """Compute the gradients of q, k, v, of the weights that are not None, and of the bias if requested."""
    *operands, is_causal, window_size, scale, num_groups = rest
    B, bias = len(q), operands[-2]
    tensors = _Tensors(q, k, v, *operands)
    split = share(B, tensors.count_blocks(), has_sums=True)
    d_out, dq = dense(d_out), _by_token(q)
    dk, dv = (_by_token(x, split.parts * B) for x in (k, v))
    grads = [_empty_gradient(w, i % WEIGHTS, B, split.parts) for i, w in enumerate(tensors.weights)]
    d_bias, stride = None, 0
    if of_bias:
        d_bias, split = _bias_sums(tensors.bias, q, split)
        stride = d_bias.stride(0) if len(d_bias) > 1 else 0
    backward = BACKWARD.pack(
        *(*matrix(d_out), *matrix(dq), *matrix(dk), *matrix(dv), *compositions(grads)),
        *(*mask_strides(None if d_bias is None else d_bias[0]), stride),
    )
    tensors.call(split, CallOptions(is_causal, window_size, scale, num_groups), dq, softmax, None, backward)
    sums = [_add_rows(x, B) for x in (dk, dv)]
    grads = [_finish_gradient(g, i % WEIGHTS, B) for i, g in enumerate(grads) if g is not None]
    if of_bias:
        grads.append(d_bias.sum(0).sum_to_size(bias.shape))
    grads = [dq, *sums, *grads]
    return grads if q.dtype == torch.float32 else [g.to(q.dtype) for g in grads]


composed_backward = torch.library.custom_op(
    f"{NAME}_backward",
    _backward,
    mutates_args=(),
    schema=f"(Tensor d_out, Tensor softmax, bool of_bias, {OPERANDS}, {OPTIONS}) -> Tensor[]",
)


def _empty_gradient(w: Tensor | None, index: int, B: int, parts: int) -> Tensor | None:
    """Allocate the gradient of a weight: for the key side one per part, for the base one per row and part."""
    if w is None:
        return None
    return (
        w.new_empty(B * parts, *w.shape)
        if index == BASE
        else w.new_empty(B * parts if index in KEY_WEIGHTS else B, *w.shape[1:])
    )


def _finish_gradient(grad: Tensor, index: int, B: int) -> Tensor:
    return grad.sum(0) if index == BASE else _add_parts(grad, B) if index in KEY_WEIGHTS else grad


def _add_parts(grad: Tensor, B: int) -> Tensor:
    """Sum the parts of each row: [parts * B, ...] -> [B, ...]."""
    return grad if len(grad) == B else grad.unflatten(0, (-1, B)).sum(0)


def _add_rows(x: Tensor, B: int) -> Tensor:
    """Sum the parts of [parts * B, H, T, D]; tokens stay before heads in memory."""
    return x if len(x) == B else _add_parts(x.transpose(1, 2), B).transpose(1, 2)


def _bias_sums(bias: Tensor, q: Tensor, split: WorkSplit) -> tuple[Tensor, WorkSplit]:
    """Allocate buffers for the gradient of a bias: one, or several summed in a fixed order if threads would otherwise
    add to the same elements.
    """
    is_disjoint = len(bias) == len(q) and (bias.shape[2] == q.shape[2] or split.parts == 1)
    slots = split.slots if is_disjoint else min(split.slots, 2 * split.threads)
    return bias.new_zeros(1 if is_disjoint else max(1, slots), *bias.shape), split._replace(slots=slots)


@composed_backward.register_fake
def _(d_out, softmax, of_bias, q, k, v, *rest):
    weights, bias = rest[: len(WEIGHT_NAMES)], rest[len(WEIGHT_NAMES)]
    grads = [_by_token(x).to(q.dtype) for x in (q, k, v)]
    grads += [w.new_empty(w.shape) for w in weights if w is not None]
    return grads + ([bias.new_empty(bias.shape)] if of_bias else [])


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:NUM_OPERANDS], output[1])
    ctx.options = inputs[NUM_OPERANDS:]
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, d_out: Tensor, _: Tensor | None):
    *operands, softmax = ctx.saved_tensors
    of_bias = operands[-2] is not None and ctx.needs_input_grad[NUM_OPERANDS - 2]
    call = composed_backward if torch.is_grad_enabled() or is_watched(d_out, *operands) else _backward
    grads = iter(call(d_out, softmax, of_bias, *operands, *ctx.options))
    of_operands = [None if x is None else next(grads) for x in operands[:-2]]
    return *of_operands, next(grads) if of_bias else None, None, *[None] * len(ctx.options)


composed.register_autograd(_differentiate, setup_context=_setup)
composed_backward.register_autograd(lambda ctx, *grads: refuse_derivative("cpu", "second"))


class ComposedAttention(torch.autograd.Function):
    """The operator for eager mode, where the overhead of a custom operator exceeds the cost of a small call."""

    @staticmethod
    def forward(ctx, *inputs):
        output = (composed if is_watched(*inputs[:NUM_OPERANDS]) else _forward)(*inputs)
        _setup(ctx, inputs, output)
        return output

    backward = staticmethod(_differentiate)

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_derivative("cpu", "forward-mode")
