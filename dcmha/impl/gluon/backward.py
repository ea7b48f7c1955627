"""Backward pass over the chunks of `forward.py`; scores are recomputed.

x = scale q k^T;  da = do v^T;  the mixing kernels;  dq = scale dx k;  dk += scale dx^T q;  dv += a^T do

The mixing kernels are post_gradients, key_gradients, pre_gradients; for short rows short_gradients, key_gradients; for
groups of more than 16 heads post_gradients, wide_key_gradients, pre_gradients, wide_key_gradients.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..chunks import Chunk
from . import kernels, key_kernel, short_kernels, wide_key_kernel
from .call import Attention
from .forward import LOG2E
from .products import add_product, multiply_queries, put_product


class Gradients(NamedTuple):
    """Gradients of a call; those of compose weights are packed [B, tokens, 2R + gate, H]; None if there is none."""

    q: Tensor
    k: Tensor
    v: Tensor
    pre_query: Tensor | None
    pre_key: Tensor | None
    pre_base: Tensor | None
    post_query: Tensor | None
    post_key: Tensor | None
    post_base: Tensor | None
    mask: Tensor | None


class Buffers(NamedTuple):
    """Buffers reused by all chunks; None if a call does not need them.

    Attributes:
        x: Scores.
        da: Gradient of the composed weights.
        p: Softmax weights, for groups of more than 16 heads.
        a: Composed weights; for long rows the same buffer as x or p.
        dx: Gradient of the scores; for long rows the same buffer as da.
        dy: Gradient of the composed scores.
        delta: Sums of weights times their gradients, [sets, T, 16 BLOCKS].
        matrices: Matrices of each query for `key_gradients`, [sets Q, 2, 16, 16].
        pre_base, post_base: Gradients of each query's matrices, [sets Q, BLOCKS, BLOCKS, 16, 16], float32.
    """

    x: Tensor
    da: Tensor
    p: Tensor | None
    a: Tensor
    dx: Tensor
    dy: Tensor | None
    delta: Tensor
    matrices: Tensor | None
    pre_base: Tensor | None
    post_base: Tensor | None


def backward(call: Attention, d_out: Tensor) -> Gradients:
    """Compute all gradients.

    Args:
        call: The call, with the log-sum-exps that `forward` returned.
        d_out: Gradient of the output [B, H, T, D], contiguous.
    """
    grads = _empty_gradients(call)
    buffers = _buffers(call, grads)
    for chunk in call.plan:
        _compute_weights_gradients(call, chunk, d_out, grads, buffers)
        a, dx = call.scores(buffers.a, chunk), call.scores(buffers.dx, chunk)
        put_product(grads.q, dx, call.keys(call.k, chunk), call.scale, chunk, call)
        add_product(grads.k, dx, call.queries(call.q, chunk), call.scale, chunk, call)
        add_product(grads.v, a, call.queries(d_out, chunk), 1.0, chunk, call)
    return Gradients(*(None if grad is None else grad.to(call.q.dtype) for grad in grads))


def _compute_weights_gradients(
    call: Attention, chunk: Chunk, d_out: Tensor, grads: Gradients, buffers: Buffers
) -> None:
    """Compute a chunk's composed weights and gradient of the scores, and the gradients of compositions and masks."""
    x, da, p, a, dx, dy, delta, matrices, pre_base, post_base = buffers
    lse = call.lse[0]
    multiply_queries(call.queries(call.q, chunk), call.keys(call.k, chunk), call.scale * LOG2E, call.scores(x, chunk))
    multiply_queries(call.queries(d_out, chunk), call.keys(call.v, chunk), 1.0, call.scores(da, chunk))
    queries, keys = (lse, delta, matrices), (x, da, lse, delta, matrices)
    if call.is_short:
        given = (x, da, a, dx, *queries, grads.pre_query, grads.post_query, pre_base, post_base)
        call.run(short_kernels.short_gradients, chunk, given)
        _compute_key_gradients(call, chunk, keys, grads)
    else:
        call.run(kernels.post_gradients, chunk, (x, da, p, *queries, grads.post_query, post_base))
        if p is None:
            _compute_key_gradients(call, chunk, keys, grads)
        else:
            _compute_wide_key_gradients(call, chunk, p, da, grads.post_key, 1)
        call.run(kernels.pre_gradients, chunk, (x, da, p, dy, lse, delta, grads.pre_query, pre_base))
        if p is not None:
            _compute_wide_key_gradients(call, chunk, x, dy, grads.pre_key, 0)
    for total, sums in ((grads.pre_base, pre_base), (grads.post_base, post_base)):
        if total is not None:
            add_base(total, sums, chunk, call)
    if grads.mask is not None:
        add_mask(grads.mask, chunk.workspace(dy, call.heads), chunk, call)


def _compute_key_gradients(call: Attention, chunk: Chunk, tensors: tuple, grads: Gradients) -> None:
    """Compute the gradients of the keys' weights, or add a chunk's; `tensors` are the first ones of `key_gradients`."""
    part = key_kernel.Part(grads.pre_key is not None, grads.post_key is not None)

    def run(results: list[Tensor | None], splits: int) -> None:
        given = (*tensors, *results, *call.packed)
        call.run_key_side(key_kernel.key_gradients, chunk, given, (*call.specs, part), splits)

    if any(part):
        _sum_key_gradients(call, chunk, [grads.pre_key, grads.post_key], run)


def _compute_wide_key_gradients(
    call: Attention, chunk: Chunk, x: Tensor, d: Tensor | None, total: Tensor | None, number: int
) -> None:
    """Compute the gradients of the keys' weights of composition `number`, or add a chunk's, for 32 heads at a time."""

    def run(results: list[Tensor | None], splits: int) -> None:
        for first in range(0, call.blocks, 2):
            part = wide_key_kernel.Part(first, min(call.blocks, first + 2), bool(number), (math.log(2.0), 1.0)[number])
            given, constants = (x, d, *results, call.packed[number]), (call.specs[number], part)
            call.run_key_side(wide_key_kernel.wide_key_gradients, chunk, given, constants, splits)

    if total is not None:
        _sum_key_gradients(call, chunk, [total], run)


def _sum_key_gradients(
    call: Attention, chunk: Chunk, totals: list[Tensor | None], run: Callable[[list[Tensor | None], int], None]
) -> None:
    """Run a kernel that writes gradients of the keys' weights; sum partial results if programs share a tile of keys."""
    splits = call.key_splits(chunk)
    if splits == 1:
        run(totals, 1)
        return
    parts_of_all = [_empty_parts(call, chunk, total, splits) for total in totals]
    run(parts_of_all, splits)
    first, last = call.key_range(chunk)
    for total, parts in zip(totals, parts_of_all, strict=True):
        if total is not None:
            found, place = parts[:, :, : last - first].sum(0), total[chunk.rows, first:last]
            place.copy_(found) if call.covers_keys else place.add_(found)


def _empty_parts(call: Attention, chunk: Chunk, total: Tensor | None, splits: int) -> Tensor | None:
    """Allocate the sums of programs that share tiles of keys [splits, rows, columns, COUNT, H]."""
    if total is None:
        return None
    return total.new_empty(splits, chunk.num_rows, chunk.num_keys, *total.shape[2:], dtype=torch.float32)


def _empty_gradients(call: Attention) -> Gradients:
    """Allocate the gradients: sums over chunks in float32, others in the dtype of the call."""
    q = call.q
    dq = torch.empty_like(q) if call.plan else torch.zeros_like(q)
    sums = torch.empty_like if call.covers_keys else _zeros_float32
    weights = [
        grad
        for spec, packed in zip(call.specs, call.packed, strict=True)
        for grad in (
            _empty_weights(q, call.T, 2 * spec.QUERY_RANK + spec.QUERY_GATE, call, is_sum=False),
            _empty_weights(q, call.S, 2 * spec.KEY_RANK + spec.KEY_GATE, call, is_sum=not call.covers_keys),
            None if packed.base is None else _zeros_float32(packed.base),
        )
    ]
    mask = None if call.mask_shape is None else q.new_zeros(call.mask_shape, dtype=torch.float32)
    return Gradients(dq, sums(call.k), sums(call.v), *weights, mask)


def _zeros_float32(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=torch.float32)


def _empty_weights(q: Tensor, tokens: int, count: int, call: Attention, is_sum: bool) -> Tensor | None:
    """Allocate gradients of packed weights [B, tokens, 2R + gate, H]."""
    if count == 0:
        return None
    shape = (call.B, tokens, count, call.heads.count)
    return q.new_zeros(shape, dtype=torch.float32) if is_sum or not call.plan else q.new_empty(shape)


def _buffers(call: Attention, grads: Gradients) -> Buffers:
    """Allocate the largest chunk."""
    is_wide = call.blocks > 1
    has_keys = grads.pre_key is not None or grads.post_key is not None
    x, da = call.workspace(), call.workspace()
    p = _workspace_of_results(call) if is_wide else None
    return Buffers(
        x=x,
        da=da,
        p=p,
        a=_workspace_of_results(call) if call.is_short else p if is_wide else x,
        dx=_workspace_of_results(call) if call.is_short else da,
        dy=call.workspace() if grads.mask is not None or (is_wide and grads.pre_key is not None) else None,
        delta=call.statistics(),
        matrices=_per_query(call, call.q.dtype, 2) if has_keys and not is_wide else None,
        pre_base=None if grads.pre_base is None else _per_query(call, torch.float32),
        post_base=None if grads.post_base is None else _per_query(call, torch.float32),
    )


def _workspace_of_results(call: Attention) -> Tensor:
    """Allocate the output buffer of a kernel; zeros if blocks have rows without a query."""
    buffer = call.workspace()
    return buffer.zero_() if call.kind.BAND > 0 else buffer


def _per_query(call: Attention, dtype: torch.dtype, *shape: int) -> Tensor:
    """Allocate matrices [16 from, 16 to] of each pair of blocks, of each query and set of a chunk."""
    most = max((-(-c.num_rows * call.kind.NUM_GROUPS // call.pack) * c.num_queries for c in call.plan), default=0)
    return call.q.new_empty(most, *shape, call.blocks, call.blocks, 16, 16, dtype=dtype)


def add_base(d_base: Tensor, sums: Tensor, chunk: Chunk, call: Attention) -> None:
    """Add the gradients of a chunk's matrices, of all slots of a set, to that of a base [G, HEADS, HEADS]."""
    instances, heads = chunk.num_rows * call.kind.NUM_GROUPS, call.kind.HEADS
    sets = -(-instances // call.pack)
    sums = sums[: sets * chunk.num_queries].unflatten(0, (sets, -1)).sum(1)  # [sets, from block, to block, 16, 16]
    whole = sums.transpose(2, 3).reshape(sets, 16 * call.blocks, 16 * call.blocks)
    size = call.kind.GROUP_SLOTS
    parts = whole.view(sets, call.pack, size, call.pack, size).diagonal(dim1=1, dim2=3).movedim(-1, 1).flatten(0, 1)
    d_base += parts[:instances, :heads, :heads].unflatten(0, (chunk.num_rows, -1)).sum(0)


def add_mask(d_mask: Tensor, dy: Tensor, chunk: Chunk, call: Attention) -> None:
    """Add the gradient of a chunk's composed scores to that of the mask, summed over broadcast axes."""
    dy = dy.view(chunk.num_rows, call.heads.count, chunk.num_queries, -1)[..., : call.real_keys(chunk)]
    place = d_mask
    keys = slice(chunk.first_key, chunk.first_key + call.real_keys(chunk))
    for axis, part in enumerate((chunk.rows, slice(None), chunk.queries, keys)):
        if d_mask.shape[axis] > 1:
            place = place[(slice(None),) * axis + (part,)]
    same = [axis for axis in range(4) if d_mask.shape[axis] == 1]
    place += dy.sum(same, keepdim=True, dtype=torch.float32) if same else dy
