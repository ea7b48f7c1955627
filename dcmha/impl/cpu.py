"""Composed attention on a CPU, in eager mode: blocks that stay in its cache, with a backward pass of their own.

The low-rank factors, gate and base of a composition are merged into one matrix per query and one per key (equation
8), and mixing the heads becomes a batched product. Blocks of rows or queries small enough to stay in cache go through
all steps one after the other; the backward pass computes a block's scores and weights again, so that nothing of size
T x S is kept.

Forward, for a block (X scores, P weights, M matrices whose rows are old heads and columns new ones):

    Y = M1q^T X + M1k^T X      P = softmax(Y)      A = M2q^T P + M2k^T P      out = A v

Backward (derivation in dcmha/README.md):

    dA = dout v^T     dP = M2q dA + M2k dA     dY = P (dP - sum_j P dP)     dX = M1q dY + M1k dY
    dM2q = P dA^T and dM1q = X dY^T, summed over the keys; dM2k and dM1k likewise over the queries
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, G head groups; of a block: b rows, t queries, s keys

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..weights import ComposeWeights, SideWeights
from .call import Call, refuse_derivative
from .masking import both_visible, key_range, masked_softmax, visible_keys


class BlockSize(NamedTuple):
    """How large blocks are.

    Attributes:
        elements: Elements of one [b, t, H, s] tensor, about: 1 MiB in float32, so that a core's cache holds a few.
        min_queries: Fewest queries, if there are as many.
    """

    elements: int = 2**18
    min_queries: int = 16


class Kind(NamedTuple):
    """What a call is, apart from its tensors; arguments of `composed_attention`."""

    is_causal: bool
    window: int | None
    scale: float


DEFAULT_SIZE = BlockSize()


class Block(NamedTuple):
    """A range of rows of the batch, of queries, and of the keys those may see."""

    rows: slice
    queries: slice
    keys: slice


def attention(call: Call, size: BlockSize = DEFAULT_SIZE) -> Tensor:
    """Compute composed attention block by block, forward and backward, without dropout: [B, H, T, D]."""
    dtype = torch.promote_types(call.q.dtype, torch.float32)
    matrices = [m for weights in (call.pre, call.post) for m in _merge(weights, call.num_groups, dtype)]
    masks = _four_axes(call.bias), _four_axes(call.visible)
    kind = Kind(call.is_causal, call.window, call.scale)
    return BlockedAttention.apply(call.q, call.k, call.v, *matrices, *masks, kind, size)


def _four_axes(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


def _merge(weights: ComposeWeights | None, num_groups: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Merge a composition into matrices per query, identity and base in them, and per key [B, T or S, G, H/G, H/G]."""
    if weights is None:
        return None, None
    query = _merge_side(weights.query, num_groups, dtype)
    key = _merge_side(weights.key, num_groups, dtype)
    if query is None and weights.base is not None:
        query = weights.base.new_zeros(1, 1, *weights.base.shape, dtype=dtype)
    if query is not None:
        query = query + torch.eye(query.shape[-1], dtype=dtype, device=query.device)
        query = query if weights.base is None else query + weights.base.to(dtype)
    return query, key


def _merge_side(side: SideWeights, num_groups: int, dtype: torch.dtype) -> Tensor | None:
    """Fold one side's weights into matrices [B, T or S, G, H/G (from), H/G (to)]."""
    down, up, gate = side.map(lambda w: w.to(dtype).unflatten(-1, (num_groups, -1)))
    matrix = None if gate is None else torch.diag_embed(gate)
    if down is None:
        return matrix
    low_rank = torch.einsum("btrgh,btrgk->btghk", down, up)
    return low_rank if matrix is None else low_rank + matrix


class BlockedAttention(torch.autograd.Function):
    """Blocked composed attention with merged matrices; keeps its inputs alone for the backward pass."""

    @staticmethod
    def forward(ctx, q, k, v, pre_query, pre_key, post_query, post_key, bias, visible, kind, size):
        tensors = (q, k, v, pre_query, pre_key, post_query, post_key, bias, visible)
        ctx.save_for_backward(*tensors)
        ctx.kind, ctx.size = kind, size
        out = torch.empty_like(q)
        for block in _blocks(q, k, kind, size):
            part = _BlockPass(block, *tensors, kind)
            part.weights()
            composed = _compose(part.p, part.p_by_key, part.post_query, part.post_key)
            out[block.rows, :, block.queries] = _by_head(composed).to(v.dtype) @ part.v
        return out

    @staticmethod
    def backward(ctx, grad_out):
        gradients = BlockedGradient.apply(grad_out, *ctx.saved_tensors, ctx.kind, ctx.size, ctx.needs_input_grad)
        return *gradients, None, None, None

    @staticmethod
    def jvp(ctx, *tangents):
        refuse_derivative("cpu", "forward-mode")


class BlockedGradient(torch.autograd.Function):
    """The backward pass of `BlockedAttention`. A function of its own, so that a second derivative, which goes through
    all its inputs, meets its refusal.
    """

    @staticmethod
    def forward(ctx, grad_out, q, k, v, pre_query, pre_key, post_query, post_key, bias, visible, kind, size, needed):
        tensors = (q, k, v, pre_query, pre_key, post_query, post_key, bias, visible)
        gradients = [
            torch.zeros_like(x) if x is not None and is_needed else None
            for x, is_needed in zip(tensors[:8], needed, strict=False)
        ]
        with torch.autocast(grad_out.device.type, enabled=False):
            for block in _blocks(q, k, kind, size):
                part = _BlockPass(block, *tensors, kind)
                part.weights()
                part.backward(grad_out, gradients)
        return tuple(gradients)

    @staticmethod
    def backward(ctx, *grads):
        refuse_derivative("cpu", "second")


def _blocks(q: Tensor, k: Tensor, kind: Kind, size: BlockSize) -> Iterator[Block]:
    """Cut the work: several whole rows where they are small, ranges of queries of one row where they are large."""
    (B, H, T, _), S = q.shape, k.shape[2]
    rows = max(1, min(B, size.elements // max(1, H * T * S)))
    queries = T if rows > 1 else min(T, max(size.min_queries, size.elements // max(1, H * S)))
    for start in range(0, T, max(1, queries)):
        stop = min(start + queries, T)
        keys = slice(*key_range(start, stop, T, S, kind.is_causal, kind.window))
        for first in range(0, B, rows):
            yield Block(slice(first, min(first + rows, B)), slice(start, stop), keys)


class _BlockPass:
    """One block's tensors on their way forward and backward. Scores and weights lie as [b, t, H, s]."""

    def __init__(self, block, q, k, v, pre_query, pre_key, post_query, post_key, bias, visible, kind) -> None:
        rows, queries, keys = block
        self.block, self.kind = block, kind
        self.q, self.k, self.v = q[rows, :, queries], k[rows, :, keys], v[rows, :, keys]
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.pre_query, self.post_query = (_pick(m, rows, queries) for m in (pre_query, post_query))
        self.pre_key, self.post_key = (_pick(m, rows, keys) for m in (pre_key, post_key))
        cut = (rows, slice(None), queries, keys)
        self.bias, mask = (m if m is None else m[_broadcast_cut(m, cut)].transpose(1, 2) for m in (bias, visible))
        T, S = q.shape[2], k.shape[2]
        self.may_be_empty = visible is not None or T > S
        position = visible_keys(
            self.q.shape[2],
            self.k.shape[2],
            is_causal=kind.is_causal,
            window=kind.window,
            device=q.device,
            query_offset=queries.start + S - T,
            key_offset=keys.start,
        )
        self.visible = both_visible(None if position is None else position[:, None], mask)

    def weights(self) -> None:
        """Compute scores x and weights p, and each as the keys see it where a key side will need it."""
        scores = self.q @ self.k.mT  # [b, H, t, s]
        self.x = _by_query(scores).to(self.dtype).mul_(self.kind.scale)
        self.x_by_key = None if self.pre_key is None else _by_key(self.x)
        y = _compose(self.x, self.x_by_key, self.pre_query, self.pre_key)
        if self.bias is not None:
            y = y + self.bias
        self.p = masked_softmax(y, self.visible, may_be_empty=self.may_be_empty)
        self.p_by_key = None if self.post_key is None else _by_key(self.p)

    def backward(self, grad_out: Tensor, gradients: list[Tensor | None]) -> None:
        """Add this block's part to the gradients of q, k, v, the four matrices and the bias."""
        rows, queries, keys = self.block
        dq, dk, dv, d_pre_query, d_pre_key, d_post_query, d_post_key, d_bias = gradients[:8]
        grad_out = grad_out[rows, :, queries]
        if dv is not None:
            composed = _by_head(_compose(self.p, self.p_by_key, self.post_query, self.post_key))
            dv[rows, :, keys] += composed.to(grad_out.dtype).mT @ grad_out
        da = _by_query(grad_out @ self.v.mT).to(self.dtype)
        dp, d_query, d_key = _compose_backward(da, self.p, self.p_by_key, self.post_query, self.post_key)
        _accumulate(d_post_query, d_query, rows, queries)
        _accumulate(d_post_key, d_key, rows, keys)
        dy = torch._softmax_backward_data(dp, self.p, -1, self.dtype)
        if d_bias is not None:
            cut = _broadcast_cut(d_bias, (rows, slice(None), queries, keys))
            d_bias[cut] += dy.transpose(1, 2).sum_to_size(d_bias[cut].shape)
        dx, d_query, d_key = _compose_backward(dy, self.x, self.x_by_key, self.pre_query, self.pre_key)
        _accumulate(d_pre_query, d_query, rows, queries)
        _accumulate(d_pre_key, d_key, rows, keys)
        dx = _by_head(dx.mul_(self.kind.scale)).to(self.q.dtype)
        if dq is not None:
            dq[rows, :, queries] += dx @ self.k
        if dk is not None:
            dk[rows, :, keys] += dx.mT @ self.q


def _pick(matrix: Tensor | None, rows: slice, tokens: slice) -> Tensor | None:
    """Cut matrices [B or 1, T or S or 1, G, H/G, H/G]; those of a static base alone are shared by all tokens."""
    if matrix is None or matrix.shape[1] == 1:
        return matrix if matrix is None or matrix.shape[0] == 1 else matrix[rows]
    return matrix[rows, tokens]


def _accumulate(total: Tensor | None, part: Tensor | None, rows: slice, tokens: slice) -> None:
    if total is not None:
        target = _pick(total, rows, tokens)
        target += part.sum_to_size(target.shape)


def _broadcast_cut(mask: Tensor, cut: tuple[slice, ...]) -> tuple[slice, ...]:
    """Cut only the axes a mask does not broadcast along."""
    return tuple(slice(None) if size == 1 else part for size, part in zip(mask.shape, cut, strict=True))


def _by_query(x: Tensor) -> Tensor:
    """[b, H, t, s] -> [b, t, H, s]."""
    return x.transpose(1, 2).contiguous()


_by_head = _by_query  # [b, t, H, s] -> [b, H, t, s] swaps the same two axes


def _by_key(x: Tensor) -> Tensor:
    """[b, t, H, s] -> [b, s, H, t]."""
    return x.transpose(1, 3).contiguous()


def _mix(matrix: Tensor, x: Tensor, is_transposed: bool) -> Tensor:
    """Multiply the heads of x [b, t, H, s] by its tokens' matrices [b, t, G, H/G, H/G], or by their transposes."""
    b, t, H, s = x.shape
    G = matrix.shape[2]
    matrix = matrix.expand(b, t, -1, -1, -1).reshape(b * t * G, H // G, H // G)
    return torch.bmm(matrix.mT if is_transposed else matrix, x.view(b * t * G, H // G, s)).view(b, t, H, s)


def _outer(x: Tensor, y: Tensor, num_groups: int) -> Tensor:
    """Sum x y^T over the last axis: [b, t, H, s] twice -> [b, t, G, H/G, H/G]."""
    b, t, H, s = x.shape
    x, y = (part.view(b * t * num_groups, H // num_groups, s) for part in (x, y))
    return torch.bmm(x, y.mT).view(b, t, num_groups, H // num_groups, H // num_groups)


def _compose(x: Tensor, x_by_key: Tensor | None, query: Tensor | None, key: Tensor | None) -> Tensor:
    """Apply a composition; `query` holds the identity, None is the identity alone."""
    out = x if query is None else _mix(query, x, is_transposed=True)
    if key is None:
        return out
    by_key = _mix(key, x_by_key, is_transposed=True).transpose(1, 3)
    return x + by_key if query is None else out.add_(by_key)


def _compose_backward(
    grad: Tensor, x: Tensor, x_by_key: Tensor | None, query: Tensor | None, key: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of `_compose` for x, the query matrices and the key matrices."""
    dx, d_query, d_key = grad, None, None
    if query is not None:
        dx, d_query = _mix(query, grad, is_transposed=False), _outer(x, grad, query.shape[2])
    if key is not None:
        grad_by_key = _by_key(grad)
        d_key = _outer(x_by_key, grad_by_key, key.shape[2])
        by_key = _mix(key, grad_by_key, is_transposed=False).transpose(1, 3)
        dx = dx + by_key if query is None else dx.add_(by_key)
    return dx, d_query, d_key
