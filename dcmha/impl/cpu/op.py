"""PyTorch operator around the C++ library, with its gradient."""

# B batch, T query tokens, S key tokens, H heads, D head dim, G head groups

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from ..call import AttentionCall, ranks_of
from ..flatten import PARTS, flat_weights, tensors_of
from ..masking import both_visible, mask_of_documents
from ..operator import AttentionOperator, Functions
from .library import load
from .structures import Call, Mask, Matrix, compositions, compositions_from, dense, dense_call, mask, matrix
from .work_split import WorkSplit, share, share_keys

BASE = PARTS.index("base")
KEY_PARTS = tuple(PARTS.index(f"key_{part}") for part in ("down", "up", "gate"))


class Gradients(NamedTuple):
    """Arguments of the backward pass in `Call`."""

    d_out: Matrix
    dq: Matrix
    dk: Matrix
    dv: Matrix
    compositions: ctypes.Array
    d_bias: Mask
    d_bias_slot: int


def _prepare(call: AttentionCall) -> AttentionCall:
    """Merge documents into the boolean mask; masks get four axes."""
    visible = call.visible
    if call.document_ids is not None:
        visible = both_visible(visible, mask_of_documents(call.document_ids, call.q.shape[2]))
    visible, bias = (m if m is None else m[(None,) * (4 - m.dim())] for m in (visible, call.bias))
    return call._replace(visible=visible, bias=bias, document_ids=None)


def _forward(call: AttentionCall, seed: None) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, T, D], and per row the maximum score and the inverse softmax sum [B, H, T, 2]."""
    dtype, call = call.q.dtype, dense_call(call)
    q, B = call.q, len(call.q)
    library = load(ranks_of(call.pre, call.post))
    split = share_keys(B, library.count_blocks(q.shape[2]), call.k.shape[2])
    out, softmax = _by_token(q, split.shares * B), q.new_empty(*q.shape[:3], 2)
    sums = q.new_empty(split.shares, *q.shape[:3], 2) if split.shares > 1 else None
    _run(library, call, split, out, softmax, sums)
    return _add_rows(out, B).to(dtype), softmax


def _backward(d_out: Tensor, call: AttentionCall, seed: None, softmax: Tensor, bias_gradient: bool) -> list[Tensor]:
    dtype, bias_shape, call = call.q.dtype, None if call.bias is None else call.bias.shape, dense_call(call)
    B, weights = len(call.q), [*flat_weights(call.pre), *flat_weights(call.post)]
    library = load(ranks_of(call.pre, call.post))
    split = share(B, library.count_blocks(call.q.shape[2]), has_sums=True)
    d_out, dq = dense(d_out), _by_token(call.q)
    dk, dv = (_by_token(x, split.parts * B) for x in (call.k, call.v))
    grads = [_empty_gradient(w, i % len(PARTS), B, split.parts) for i, w in enumerate(weights)]
    d_bias, stride = None, 0
    if bias_gradient:
        d_bias, split = _bias_sums(call.bias, call.q, split)
        stride = d_bias.stride(0) if len(d_bias) > 1 else 0
    matrices = map(matrix, (d_out, dq, dk, dv))
    gradients = Gradients(*matrices, compositions_from(grads), mask(None if d_bias is None else d_bias[0]), stride)
    _run(library, call, split, dq, softmax, None, gradients)
    of_weights = [_finish_gradient(g, i % len(PARTS), B) for i, g in enumerate(grads) if g is not None]
    of_bias = [d_bias.sum(0).sum_to_size(bias_shape)] if bias_gradient else []
    grads = [dq, _add_rows(dk, B), _add_rows(dv, B), *of_weights, *of_bias]
    return grads if dtype == torch.float32 else [g.to(dtype) for g in grads]


def _run(
    library: ctypes.CDLL,
    call: AttentionCall,
    split: WorkSplit,
    out: Tensor,
    softmax: Tensor,
    sums: Tensor | None,
    gradients: Gradients | tuple = (),
) -> None:
    """Call the C++ function on a dense call: the backward pass if there are gradients."""
    (B, H, T, D), (_, key_heads, S, _) = call.q.shape, call.k.shape
    window_size = min(call.window_size or 0, T + S)
    arguments = Call(
        *(B, H, call.num_groups, H // key_heads, T, S, D, *split, call.is_causal, window_size, call.scale),
        *(matrix(x) for x in (call.q, call.k, call.v, out)),
        *(softmax.data_ptr(), None if sums is None else sums.data_ptr()),
        *(compositions(call), mask(call.visible), mask(call.bias)),
        *gradients,
    )
    if library.composed_attention(ctypes.byref(arguments), bool(gradients)):
        raise MemoryError(f"composed attention of q {list(call.q.shape)} and k {list(call.k.shape)}: out of memory.")


def _by_token(x: Tensor, B: int | None = None) -> Tensor:
    """Allocate float32 [B, H, T, D] like x, with tokens before heads in memory, as the layer's projections expect."""
    rows, H, T, D = x.shape
    return x.new_empty(B or rows, T, H, D, dtype=torch.float32).transpose(1, 2)


def _empty_gradient(w: Tensor | None, part: int, B: int, parts: int) -> Tensor | None:
    """Allocate the gradient of a weight: for the key side one per part, for the base one per row and part."""
    if w is None:
        return None
    if part == BASE:
        return w.new_empty(B * parts, *w.shape)
    return w.new_empty(B * parts if part in KEY_PARTS else B, *w.shape[1:])


def _finish_gradient(grad: Tensor, part: int, B: int) -> Tensor:
    return grad.sum(0) if part == BASE else _add_parts(grad, B) if part in KEY_PARTS else grad


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


def _empty_output(call: AttentionCall) -> tuple[Tensor, Tensor]:
    q = call.q
    return _by_token(q).to(q.dtype), q.new_empty(*q.shape[:3], 2, dtype=torch.float32)


def _empty_gradients(call: AttentionCall, bias_gradient: bool) -> list[Tensor]:
    q, k, v, *weights, bias = tensors_of(call)
    grads = [_by_token(x).to(q.dtype) for x in (q, k, v)]
    grads += [w.new_empty(w.shape) for w in weights if w is not None]
    return grads + ([bias.new_empty(bias.shape)] if bias_gradient else [])


attention = AttentionOperator(
    "cpu_attention_3", "cpu", Functions(_forward, _backward, _empty_output, _empty_gradients, _prepare)
)
