"""Forward and backward passes over chunks: library products on a reused workspace, and kernels that mix its heads.

For each chunk of batch rows and queries, with their visible keys:

    forward     x = scale q k^T;  row_statistics;  composed_weights;  o = x v
    backward    x = scale q k^T;  da = do v^T;  post_gradients;  key_gradients;  pre_gradients;
                dq = scale da k;  dk += scale da^T q;  dv += x^T do

Heads that share keys and values are rows of one product.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..chunks import ALIGNMENT, Chunk, chunks, fold, key_planes, query_planes, round_up
from .launch import KernelLauncher
from .packing import CallOptions, ComposeOperands, MaskOperands


class Gradients(NamedTuple):
    """Gradients of q, k, v, the operands, and the mask (None if it requires none)."""

    q: Tensor
    k: Tensor
    v: Tensor
    operands: ComposeOperands
    mask: Tensor | None


def forward(
    q: Tensor, k: Tensor, v: Tensor, operands: ComposeOperands, mask_operands: MaskOperands, options: CallOptions
) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, T, D] and the base-2 log-sum-exp [B, H, T] for contiguous operands."""
    mixer = KernelLauncher(q, k.shape[1:3], operands.to_columns(options.num_groups), mask_operands, options)
    plan = _plan(q, k, options)
    workspace = _workspace(q, plan)
    k, v = _aligned(k), _aligned(v)
    out, lse = _result(q, plan), q.new_empty(q.shape[:3], dtype=torch.float32)
    for chunk in plan:
        x = chunk.workspace(workspace, mixer.heads)
        _multiply(query_planes(q, chunk, mixer.heads), key_planes(k, chunk).mT, options.scale, out=x)
        mixer.row_statistics(chunk, x, lse)
        mixer.composed_weights(chunk, x, lse)
        _put_queries(out, x @ key_planes(v, chunk), chunk, mixer)
    return out, lse


def backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: ComposeOperands,
    mask_operands: MaskOperands,
    lse: Tensor,
    options: CallOptions,
    mask_gradient: bool,
) -> Gradients:
    """Compute the gradients of q, k, v, of the operands, and of the mask if requested."""
    mixer = KernelLauncher(
        q, k.shape[1:3], operands.to_columns(options.num_groups), mask_operands, options, mask_gradient
    )
    plan = _plan(q, k, options, has_bands=not mask_gradient)
    x_space, da_space = _workspace(q, plan), _workspace(q, plan)
    dy_space = _workspace(q, plan) if mask_gradient else None
    dk, dv = (torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in (k, v))
    d_mask = torch.zeros(mask_operands.mask.shape, dtype=torch.float32, device=q.device) if mask_gradient else None
    k, v = _aligned(k), _aligned(v)
    dq, delta = _result(q, plan), torch.empty_like(lse)
    grads = ComposeOperands(*(None if w is None else torch.zeros_like(w, dtype=torch.float32) for w in mixer.operands))
    for chunk in plan:
        x, da = chunk.workspace(x_space, mixer.heads), chunk.workspace(da_space, mixer.heads)
        dy = chunk.workspace(dy_space, mixer.heads) if mask_gradient else None
        queries, d_queries = (query_planes(t, chunk, mixer.heads) for t in (q, d_out))
        keys = key_planes(k, chunk)
        _multiply(queries, keys.mT, options.scale, out=x)
        _multiply(d_queries, key_planes(v, chunk).mT, 1.0, out=da)
        mixer.post_gradients(chunk, x, da, lse, delta, grads)
        mixer.key_gradients(chunk, x, da, lse, delta, grads)
        mixer.pre_gradients(chunk, x, da, dy, lse, delta, grads)
        _put_queries(dq, _multiply(da, keys, options.scale), chunk, mixer)
        for total, product in ((dk, _multiply(da.mT, queries, options.scale)), (dv, x.mT @ d_queries)):
            fold(total[chunk.rows].flatten(0, 1), chunk.of_keys(product, mixer.heads), chunk)
        if mask_gradient:
            _add_mask(d_mask, dy.view(chunk.num_rows, mixer.heads.count, chunk.num_queries, -1), chunk, mixer.S)
    operand_grads = grads.from_columns(options.num_groups, mixer.kind.HEADS)
    return Gradients(dq, dk.to(q.dtype), dv.to(q.dtype), operand_grads, d_mask)


def _plan(q: Tensor, k: Tensor, options: CallOptions, has_bands: bool = True) -> list[Chunk]:
    B, H, T, _ = q.shape
    return chunks(B, H, T, k.shape[2], q.element_size(), options.is_causal, options.window_size, has_bands)


def _multiply(a: Tensor, b: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
    """Multiply batches of matrices: scale a b."""
    ignored = a.new_empty(1, 1, 1) if out is None else out
    return torch.baddbmm(ignored, a, b, beta=0.0, alpha=scale, out=out)


def _put_queries(whole: Tensor, part: Tensor, chunk: Chunk, mixer: KernelLauncher) -> None:
    """Write the values of a chunk's queries to [B, H, T, D]."""
    place = whole[chunk.rows, :, chunk.queries].unflatten(1, (-1, mixer.heads.shared))
    place.copy_(chunk.of_queries(part, mixer.heads))


def _add_mask(d_mask: Tensor, dy: Tensor, chunk: Chunk, S: int) -> None:
    """Add the gradient of a chunk's scores [rows, H, Q, K] to that of the mask, summed over broadcast axes."""
    keys = slice(chunk.first_key, min(S, chunk.first_key + chunk.num_keys))
    dy = dy[..., : keys.stop - keys.start]
    place = d_mask
    for axis, part in enumerate((chunk.rows, slice(None), chunk.queries, keys)):
        if d_mask.shape[axis] > 1:
            place = place[(slice(None),) * axis + (part,)]
    same = [axis for axis in range(4) if d_mask.shape[axis] == 1]
    place += dy.sum(same, keepdim=True, dtype=torch.float32) if same else dy


def _aligned(x: Tensor) -> Tensor:
    """Pad keys or values with zeros to the aligned row length of a workspace."""
    return F.pad(x, (0, 0, 0, round_up(x.shape[2], ALIGNMENT) - x.shape[2])).contiguous()


def _workspace(q: Tensor, plan: list[Chunk]) -> Tensor:
    """Allocate the workspace of the largest chunk."""
    return q.new_empty(max((chunk.workspace_size(q.shape[1]) for chunk in plan), default=0))


def _result(q: Tensor, plan: list[Chunk]) -> Tensor:
    """Allocate the result of all chunks; zeros if there are no chunks."""
    return torch.empty_like(q) if plan else torch.zeros_like(q)
