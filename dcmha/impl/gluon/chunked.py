"""Forward and backward over chunks: library products on a reused workspace, and the kernels that mix heads on it.

For each chunk of rows of the batch and queries, and the keys they may see:

    forward     x = scale q k^T;  row_statistics;  composed_weights;  o = x v
    backward    x = scale q k^T;  da = do v^T;  post_gradients;  key_gradients;  pre_gradients;
                dq = scale da k;  dk += scale da^T q;  dv += x^T do

Scores lie in the workspace in units of log 2. Heads that share keys and values are rows of one product.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

import math
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl

from ...weights import ComposeWeights
from ..triton.chunks import Chunk, Heads, chunks, fold, key_planes, query_planes
from . import kernels, key_kernel, packing
from .indexing import KernelConfig, Packed, Sizes
from .launch import launch
from .masking import Masks
from .mixing import ComposeSpec

LOG2E = 1.4426950408889634
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
NOTHING = ComposeWeights()


class Gradients(NamedTuple):
    """Gradients of a call; those of weights packed [B, tokens, 2R + gate, H], None where there is none."""

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


class Attention:
    """A call of composed attention: its sizes, packed weights, and the chunks that it is worked through in.

    Args:
        q: Queries [B, H, T, D], contiguous.
        k: Keys [B, H / shared, S, D], contiguous.
        v: Values, likewise.
        pre: Composition of the scores.
        post: Composition of the weights.
        masks: What hides, adds and drops.
        mask: 0 without a mask, 1 for a boolean mask, 2 for a floating one.
        is_causal: As in `composed_attention`.
        window: As in `composed_attention`; 0 for none.
        scale: As in `composed_attention`.
        num_groups: As in `composed_attention`.
        mask_shape: Shape of a mask that takes a gradient; None if none does.
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None, masks: Masks,
        mask: int, is_causal: bool, window: int, scale: float, num_groups: int,
        mask_shape: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.masks, self.scale, self.mask_shape = q, k, v, masks, scale, mask_shape
        self.B, H, self.T, self.D = q.shape
        self.S = k.shape[2]
        self.heads = Heads(H, H // k.shape[1])
        group = H // num_groups
        slots = 4 if group <= 4 else 8 if group <= 8 else -(-group // 16) * 16
        self.pack = max(1, 16 // slots)  # groups of a tile
        self.num_sets = -(-self.B * num_groups // self.pack)
        self.blocks = max(1, slots // 16)
        rows = self.pack // math.gcd(num_groups, self.pack)
        has_bands = window > 0 and mask_shape is None and (self.S - self.T) % 16 == 0
        self.plan = chunks(self.B, H, self.T, self.S, q.element_size(), is_causal, window, has_bands, rows)
        band = self.plan[0].block if self.plan and self.plan[0].plane_blocks > 1 else 0
        self.kind = KernelConfig(
            slots, group, self.blocks, num_groups, H, self.heads.shared, is_causal, window, masks.starts is not None,
            mask, mask_shape is not None, masks.seed is not None, band, False, DTYPES[q.dtype],
        )  # fmt: skip
        self.pre, self.post = pre or NOTHING, post or NOTHING
        self.specs = tuple(map(spec_of, (self.pre, self.post)))
        self.packed = self._pack()

    def _pack(self) -> tuple[Packed, Packed]:
        """Pack the weights of all sides by one launch."""
        sides = (self.pre.query, self.pre.key, self.post.query, self.post.key)
        ranks = tuple(packing.ranks_of(side, bool(n % 2)) for n, side in enumerate(sides))
        counts = [2 * rank.RANK + rank.GATE for rank in ranks]
        tiles, width = -(-self.S // 16), 16 * self.blocks
        shapes = [(self.T, width), (tiles, 16 * width)] * 2
        outs = tuple(
            None if count == 0 else self.q.new_empty(self.num_sets, tokens, count, each)
            for count, (tokens, each) in zip(counts, shapes, strict=True)
        )
        if any(counts):
            sizes = Sizes(self.B * self.kind.NUM_GROUPS, 0, self.T, self.S, 0, self.T, 1, 0, 16)
            grid = (-(-max(self.T, self.S) // 16), self.num_sets, 4)
            given = (tuple(map(packing.side_of, sides)), outs, sizes)
            launch(packing.pack_weights, grid, given, (self.kind, *ranks), self.q.device)
        return Packed(outs[0], outs[1], self.pre.base), Packed(outs[2], outs[3], self.post.base)

    def sizes(self, chunk: Chunk) -> Sizes:
        """Return the numbers of a chunk."""
        return Sizes(
            chunk.num_rows * self.kind.NUM_GROUPS, chunk.rows.start, self.T, self.S, chunk.queries.start,
            chunk.num_queries, chunk.plane_blocks, chunk.first_key, chunk.num_keys,
        )  # fmt: skip

    def run(self, kernel, chunk: Chunk, arguments: tuple, *, kind: KernelConfig | None = None, constants=()) -> None:
        """Launch a query-side kernel, or `key_gradients`, on a chunk."""
        sets = -(-chunk.num_rows * self.kind.NUM_GROUPS // self.pack)
        count = chunk.num_queries if kernel is not key_kernel.key_gradients else self._key_tiles(chunk)
        specs = self.specs[:1] if kernel is kernels.row_statistics else self.specs
        packed = self.packed[:1] if kernel is kernels.row_statistics else self.packed
        given = (*arguments, *packed, self.masks, self.sizes(chunk))
        launch(kernel, (count, sets, 1), given, (kind or self.kind, *specs, *constants), self.q.device)

    def _key_tiles(self, chunk: Chunk) -> int:
        last = chunk.first_key + (chunk.num_blocks - 1) * chunk.block + chunk.num_keys
        return -(-min(self.S, last) // 16) - max(0, chunk.first_key) // 16

    def workspace(self) -> Tensor:
        """Make room for the largest chunk."""
        return self.q.new_empty(max((chunk.workspace_size(self.heads.count) for chunk in self.plan), default=0))

    def statistics(self) -> Tensor:
        """Make room for a number of each query and slot."""
        return self.q.new_empty(self.num_sets, self.T, 16 * self.blocks, dtype=torch.float32)

    def queries(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Take queries [B, H, T, D] of a chunk as [rows H / shared blocks, shared Q, D]: a view where there is one."""
        if self.is_plain(chunk):
            return x[chunk.rows].flatten(0, 1)[:, chunk.queries]
        return query_planes(x, chunk, self.heads)

    def keys(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Take keys or values [B, H / shared, S, D] of a chunk, [rows H / shared blocks, K, D], likewise."""
        if chunk.plane_blocks == 1:
            return x[chunk.rows].flatten(0, 1)[:, chunk.first_key : chunk.first_key + self.real_keys(chunk)]
        return key_planes(x, chunk)

    def is_plain(self, chunk: Chunk) -> bool:
        """Tell whether a chunk's queries are rows of the call's, in one block."""
        return chunk.plane_blocks == 1 and self.heads.shared == 1

    def real_keys(self, chunk: Chunk) -> int:
        """Count the keys of a chunk of one block; in a chunk of several, zeros stand for those that there are not."""
        return chunk.num_keys if chunk.plane_blocks > 1 else min(chunk.num_keys, self.S - chunk.first_key)

    def scores(self, buffer: Tensor, chunk: Chunk) -> Tensor:
        """See the front of a buffer as a chunk's workspace, without the columns that pad its rows."""
        return chunk.workspace(buffer, self.heads)[:, :, : self.real_keys(chunk)]


def spec_of(weights: ComposeWeights) -> ComposeSpec:
    """Describe the branches of a composition."""
    query, key = (packing.ranks_of(side, False) for side in (weights.query, weights.key))
    return ComposeSpec(query.RANK, query.GATE, key.RANK, key.GATE, int(weights.base is not None))


def forward(call: Attention) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, T, D], and the base-2 log-sum-exp [sets, T, 16 BLOCKS]."""
    buffer, lse = call.workspace(), call.statistics()
    out = torch.empty_like(call.q) if call.plan else torch.zeros_like(call.q)
    for chunk in call.plan:
        x = call.scores(buffer, chunk)
        multiply(call.queries(call.q, chunk), call.keys(call.k, chunk).mT, call.scale * LOG2E, out=x)
        call.run(kernels.row_statistics, chunk, (buffer, lse))
        call.run(kernels.composed_weights, chunk, (buffer, lse))
        put_product(out, x, call.keys(call.v, chunk), 1.0, chunk, call)
    return out, lse


def backward(call: Attention, d_out: Tensor, lse: Tensor) -> Gradients:
    """Compute all gradients."""
    q, k, v = call.q, call.k, call.v
    x_buffer, da_buffer, delta = call.workspace(), call.workspace(), call.statistics()
    dy_buffer = call.workspace() if call.kind.MASK_GRADIENT else None
    is_one = len({(chunk.rows.start) for chunk in call.plan}) == len(call.plan)  # chunk of each row
    covers = is_one and all(c.first_key <= 0 and c.plane_blocks == 1 and call.real_keys(c) == call.S for c in call.plan)
    dq = torch.empty_like(q) if call.plan else torch.zeros_like(q)
    dk, dv = (torch.empty_like(t) if covers else torch.zeros_like(t, dtype=torch.float32) for t in (k, v))
    counts = [(2 * s.QUERY_RANK + s.QUERY_GATE, 2 * s.KEY_RANK + s.KEY_GATE) for s in call.specs]
    (d_pre, d_pre_key), (d_post, d_post_key) = (
        (
            q.new_empty(call.B, call.T, query, call.heads.count) if query else None,
            _key_sums(q, call, key, covers) if key else None,
        )
        for query, key in counts
    )
    pre_base, post_base = (
        None if packed.base is None else torch.zeros_like(packed.base, dtype=torch.float32) for packed in call.packed
    )
    base_sums = None if pre_base is None and post_base is None else _per_query(call, torch.float32)
    d_mask = None
    if call.kind.MASK_GRADIENT:
        d_mask = torch.zeros(call.mask_shape, dtype=torch.float32, device=q.device)
    matrices = _per_query(call, q.dtype, 2) if d_pre_key is not None or d_post_key is not None else None
    kind = call.kind._replace(ADDS=not covers)
    for chunk in call.plan:
        x, da = call.scores(x_buffer, chunk), call.scores(da_buffer, chunk)
        queries, d_queries = call.queries(q, chunk), call.queries(d_out, chunk)
        keys = call.keys(k, chunk)
        multiply(queries, keys.mT, call.scale * LOG2E, out=x)
        multiply(d_queries, call.keys(v, chunk).mT, 1.0, out=da)
        call.run(kernels.post_gradients, chunk, (x_buffer, da_buffer, lse, delta, matrices, d_post, base_sums))
        if base_sums is not None and post_base is not None:
            add_base(post_base, base_sums, chunk, call)
        for part in key_parts(call, d_pre_key is not None, d_post_key is not None):
            given = (x_buffer, da_buffer, lse, delta, matrices, d_pre_key, d_post_key)
            call.run(key_kernel.key_gradients, chunk, given, kind=kind, constants=(part,))
        call.run(kernels.pre_gradients, chunk, (x_buffer, da_buffer, dy_buffer, lse, delta, d_pre, base_sums))
        if base_sums is not None and pre_base is not None:
            add_base(pre_base, base_sums, chunk, call)
        if d_mask is not None:
            add_mask(d_mask, chunk.workspace(dy_buffer, call.heads), chunk, call)
        put_product(dq, da, keys, call.scale, chunk, call)
        add_product(dk, da, queries, call.scale, chunk, call)
        add_product(dv, x, d_queries, 1.0, chunk, call)
    found = (dq, dk, dv, d_pre, d_pre_key, pre_base, d_post, d_post_key, post_base, d_mask)
    return Gradients(*(None if gradient is None else gradient.to(q.dtype) for gradient in found))


def key_parts(call: Attention, has_pre: bool, has_post: bool) -> list[key_kernel.Part]:
    """List the launches of `key_gradients`: registers hold the gradients of 16 heads, or of 32 of one composition."""
    if call.blocks == 1:
        return [key_kernel.Part(has_pre, has_post, 0, 1)] if has_pre or has_post else []
    return [
        key_kernel.Part(is_pre, not is_pre, first, min(call.blocks, first + 2))
        for is_pre, has in ((True, has_pre), (False, has_post))
        for first in range(0, call.blocks, 2)
        if has
    ]


def _key_sums(q: Tensor, call: Attention, count: int, covers: bool) -> Tensor:
    shape = (call.B, call.S, count, call.heads.count)
    return q.new_empty(shape) if covers else q.new_zeros(shape, dtype=torch.float32)


def _per_query(call: Attention, dtype: torch.dtype, *shape: int) -> Tensor:
    """Make room for matrices [16 from, 16 to] of each pair of blocks, of each query and set of a chunk."""
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
    """Add the gradient of a chunk's composed scores to that of the mask, summed where the mask is the same."""
    dy = dy.view(chunk.num_rows, call.heads.count, chunk.num_queries, -1)[..., : call.real_keys(chunk)]
    place = d_mask
    keys = slice(chunk.first_key, chunk.first_key + call.real_keys(chunk))
    for axis, part in enumerate((chunk.rows, slice(None), chunk.queries, keys)):
        if d_mask.shape[axis] > 1:
            place = place[(slice(None),) * axis + (part,)]
    same = [axis for axis in range(4) if d_mask.shape[axis] == 1]
    place += dy.sum(same, keepdim=True, dtype=torch.float32) if same else dy


def multiply(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Multiply batches of matrices into a tensor: scale a b."""
    torch.baddbmm(out, a, b, beta=0.0, alpha=scale, out=out)


def put_product(whole: Tensor, a: Tensor, b: Tensor, scale: float, chunk: Chunk, call: Attention) -> None:
    """Put scale a b, which belongs to a chunk's queries, into its place in [B, H, T, D]."""
    if call.is_plain(chunk):
        multiply(a, b, scale, out=call.queries(whole, chunk))
        return
    product = torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0.0, alpha=scale)
    place = whole[chunk.rows, :, chunk.queries].unflatten(1, (-1, call.heads.shared))
    place.copy_(chunk.of_queries(product, call.heads))


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float, chunk: Chunk, call: Attention) -> None:
    """Put scale a^T b, which belongs to a chunk's keys, into [B, H / shared, S, D], or add it to float32 sums."""
    if chunk.plane_blocks == 1:
        place = call.keys(total, chunk)
        if total.dtype == a.dtype:
            multiply(a.mT, b, scale, out=place)
        else:
            torch.baddbmm(place, a.mT, b, out_dtype=torch.float32, beta=1.0, alpha=scale, out=place)
        return
    product = torch.baddbmm(a.new_empty(1, 1, 1), a.mT, b, beta=0.0, alpha=scale)
    fold(total[chunk.rows].flatten(0, 1), chunk.of_keys(product, call.heads), chunk)
