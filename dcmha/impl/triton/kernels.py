"""The five kernels that mix heads on a chunk of scores: two forward, three backward.

A chunk is a range of the batch and of queries. The workspace `x` holds its scaled scores, [rows, H, blocks, Q, K]: each
block of Q queries with the K keys that it may see (one block, unless a window makes many); `da`, of the same shape, the
gradient of the composed weights. Library products make and use them. `log_sum` [B, H, T] is in base 2, `row_sum` is
sum_j P dP, with P the weights. What a program cannot sum by itself it stores, and the launch adds up in a fixed order.

    row_statistics      x -> log_sum
    composed_weights    x -> A, in place
    post_gradients      x, da -> row_sum, gradients of the query side of the post-composition
    key_gradients       x, da -> gradients of the key side of both compositions
    pre_gradients       x, da -> gradients of the query side of the pre-composition; x -> A, da -> dX, in place

Of a kernel's arguments the integers are fields of `Sizes`, but for `num_keys`; Triton would compile a kernel anew for
other values in a tuple, so they become one inside.
"""

# B batch, T query tokens, S key tokens, H heads, Q queries and K keys of a block; of a tile: BQ queries, BK keys

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .tiles import (
    LANES,
    SLOTS,
    Form,
    Kind,
    Slots,
    exponents,
    group_sum,
    hidden_bias,
    key_bounds,
    load_vectors,
    mask_of_keys,
    mix,
    outer_sum,
    query_bounds,
    slots_of,
    split_range,
    store_vector_gradients,
    store_zeros,
    token_matrices,
    within_threads,
)

__all__ = ["EMPTY", "Form", "Kind", "Sizes"]

EMPTY = tl.constexpr(1e30)  # the log-sum of a query with no visible key: its weights become 0


class Sizes(NamedTuple):
    """Sizes that differ from call to call: no kernel is compiled anew for them.

    Attributes:
        num_instances: Groups of heads of the chunk: rows times `num_groups`.
        num_groups: G.
        H: Heads.
        row0: First row of the batch of the chunk.
        T: Queries of the call.
        S: Keys of the call.
        query0: First query of the chunk.
        num_queries: Queries of the chunk.
        block: Q, queries of a block.
        num_blocks: Blocks that hold the queries.
        plane_blocks: Blocks of a plane of the workspace.
        first_key: Token of the first block's first key.
        window: Keys a query sees, if there is a window.
        num_splits: Programs that share a loop.
    """

    num_instances: Any
    num_groups: Any
    H: Any
    row0: Any
    T: Any
    S: Any
    query0: Any
    num_queries: Any
    block: Any
    num_blocks: Any
    plane_blocks: Any
    first_key: Any
    window: Any
    num_splits: Any


class QueryTile(NamedTuple):
    """Where a program is of the kernels whose matrix side is the queries.

    Attributes:
        slots: What each slot holds.
        query: Queries [BQ], counted from the chunk's first.
        position: The same among all keys' positions.
        mask: Which queries and heads there are [BQ, 16].
        weight_mask: Which queries and columns of packed weights there are [BQ, 16].
        offsets: Offsets of the queries' first keys in a workspace [BQ, 16].
        key0: Token of the block's first key.
        low: First of the block's keys that the queries may see, a multiple of BK.
        high: Behind the last.
        split: Which of `num_splits` shares of them is the program's.
        width: Columns of packed weights.
    """

    slots: Slots
    query: Any
    position: Any
    mask: Any
    weight_mask: Any
    offsets: Any
    key0: Any
    low: Any
    high: Any
    split: Any
    width: Any


class KeyTile(NamedTuple):
    """A step of a loop over keys.

    Attributes:
        token: Tokens [BK] of the keys.
        real: Which keys and columns of packed weights there are [BK, 16].
        bias: -inf where a key is hidden from a query [BQ, BK, 1].
        seen: Which keys a mask lets the slots' rows see [1, BK, 1 or 16].
        place: Offsets in a workspace [BQ, BK, 16].
        inside: Which of them there are.
    """

    token: Any
    real: Any
    bias: Any
    seen: Any
    place: Any
    inside: Any


@triton.jit
def _query_tile(sizes, num_keys, KIND: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr):
    """Locate a program among the tiles of queries, blocks, splits and sets of slots: `QueryTile`."""
    num_tiles = tl.cdiv(sizes.block, BQ)
    num_parts = sizes.num_blocks * sizes.num_splits
    tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles % num_parts
    slots = slots_of(tl.program_id(0) // num_tiles // num_parts, sizes.num_instances, sizes.num_groups, KIND)
    number = part // sizes.num_splits
    in_block = tile * BQ + tl.arange(0, BQ)
    query = in_block + number * sizes.block
    is_query = (in_block < sizes.block) & (query < sizes.num_queries)
    plane = (slots.row * sizes.H + slots.head) * sizes.plane_blocks + number
    key0 = sizes.first_key + number * sizes.block
    first = sizes.query0 + number * sizes.block + tile * BQ + sizes.S - sizes.T
    low, high = key_bounds(first, first + BQ - 1, num_keys, sizes.S, key0, sizes.window, KIND, BK)
    return QueryTile(
        slots=slots,
        query=query,
        position=sizes.query0 + query + sizes.S - sizes.T,
        mask=is_query[:, None] & slots.is_real[None, :],
        weight_mask=is_query[:, None] & slots.is_instance[None, :],
        offsets=(plane * sizes.block)[None, :] * num_keys + (in_block * num_keys)[:, None],
        key0=key0,
        low=low,
        high=high,
        split=part % sizes.num_splits,
        width=sizes.num_groups * KIND.GROUP_SLOTS,
    )


@triton.jit
def _key_tile(start, tile, sizes, num_keys, key_mask, KIND: tl.constexpr, BK: tl.constexpr):
    """Prepare the tile of keys from `start`, a multiple of BK: `KeyTile`."""
    key = tl.multiple_of(start, BK) + tl.arange(0, BK)
    token = tile.key0 + key
    real = ((token >= 0) & (token < sizes.S))[:, None] & tile.slots.is_instance[None, :]
    bias = hidden_bias(tile.position[:, None], token[None, :], sizes.S, sizes.window, KIND)[:, :, None]
    seen = real
    if KIND.HAS_MASK:
        seen = mask_of_keys(key_mask, tile.slots.row + sizes.row0, tile.slots.is_instance, token, sizes.S, KIND)
    return KeyTile(
        token=token,
        real=real,
        bias=bias,
        seen=seen[None, :, :],
        place=tile.offsets[:, None, :] + key[None, :, None],
        inside=tile.mask[:, None, :] & (key < num_keys)[None, :, None],
    )


@triton.jit
def _query_side(
    packed, base, tile, sizes, BQ: tl.constexpr, RANK: tl.constexpr, GATE: tl.constexpr, BASE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Load the queries' packed weights as vectors, and build their matrices [BQ, 16, 16]."""
    row, token = tile.slots.row + sizes.row0, sizes.query0 + tile.query
    vectors = load_vectors(packed, row, sizes.T, token, tile.weight_mask, tile.slots, tile.width, RANK, GATE)
    return vectors, token_matrices(vectors, base, tile.slots, BQ, RANK, GATE, BASE, KIND)


@triton.jit
def _key_side(packed, keys, tile, sizes, RANK: tl.constexpr, GATE: tl.constexpr):
    """Load a tile's keys' packed weights as vectors [BK, 16]."""
    row = tile.slots.row + sizes.row0
    return load_vectors(packed, row, sizes.S, keys.token, keys.real, tile.slots, tile.width, RANK, GATE)


@triton.jit
def _statistics(tile, sizes):
    """Give the places of the tile's queries and heads in tensors [B, H, T]: [BQ, 16]."""
    row = tile.slots.row + sizes.row0
    return ((row.to(tl.int64) * sizes.H + tile.slots.head) * sizes.T)[None, :] + (sizes.query0 + tile.query)[:, None]


@triton.jit
def _split_statistics(tile, sizes):
    """Give their places in what each split stores, [num_splits, rows, H, num_queries]: [BQ, 16]."""
    num_rows = sizes.num_instances // sizes.num_groups
    plane = (tile.split * num_rows + tile.slots.row) * sizes.H + tile.slots.head
    return (plane * sizes.num_queries)[None, :] + tile.query[:, None]


@triton.jit
def _split_weights(tile, sizes, COUNT: tl.constexpr):
    """Give the places of the queries' packed weights in what each split stores: [BQ, 16]."""
    num_rows = sizes.num_instances // sizes.num_groups
    token = ((tile.split * num_rows + tile.slots.row) * sizes.num_queries)[None, :] + tile.query[:, None]
    return token.to(tl.int64) * COUNT * tile.width + tile.slots.column[None, :]


@triton.jit
def _store_base_sum(d_matrices, sums):
    """Store a program's share of a base's gradient, [16, 16]; the launch adds them up."""
    slots = tl.arange(0, SLOTS)
    square = slots[:, None] * SLOTS + slots[None, :]
    tl.store(sums + tl.program_id(0).to(tl.int64) * SLOTS * SLOTS + square, tl.sum(d_matrices, 0))


@triton.jit(do_not_specialize=Sizes._fields)
def row_statistics(
    x, log_sums, pre_query, pre_key, pre_base, key_mask,
    num_instances, num_groups, H, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key, window,
    num_splits, num_keys, KIND: tl.constexpr, PRE: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The base-2 logarithm of the sum of exp(composed scores), per query and head, of each split of the keys."""
    sizes = Sizes(
        num_instances, num_groups, H, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
        window, num_splits,
    )  # fmt: skip
    tile = _query_tile(sizes, num_keys, KIND, BQ, BK)
    pre_vectors, pre = _query_side(pre_query, pre_base, tile, sizes, BQ, PRE.QUERY_RANK, PRE.QUERY_GATE, PRE.BASE, KIND)
    HAS_PRE: tl.constexpr = PRE.QUERY_RANK + PRE.QUERY_GATE + PRE.BASE > 0
    sums = group_sum(BQ, KIND)
    largest = tl.full([BQ, LANES, SLOTS], -EMPTY, tl.float32)
    total = tl.zeros([BQ, LANES, SLOTS], tl.float32)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BK)
    for start in range(low, high, BK):
        keys = _key_tile(start, tile, sizes, num_keys, key_mask, KIND, BK)
        x_dot = tl.load(x + keys.place, mask=keys.inside, other=0.0).to(KIND.DOT)  # [BQ, BK, 16]
        pre_keys = _key_side(pre_key, keys, tile, sizes, PRE.KEY_RANK, PRE.KEY_GATE)
        y = mix(x_dot.to(tl.float32), x_dot, pre, pre_keys, sums, HAS_PRE, PRE.KEY_RANK, PRE.KEY_GATE)
        y = within_threads(exponents(y, keys.bias, keys.seen, KIND))  # [BQ, BK / 8, 8, 16]
        new_largest = tl.maximum(largest, tl.max(y, 1))
        total = total * tl.exp2(largest - new_largest) + tl.sum(tl.exp2(y - new_largest[:, None, :, :]), 1)
        largest = new_largest
    top = tl.max(largest, 1)
    total = tl.sum(total * tl.exp2(largest - top[:, None, :]), 1)
    nothing = tl.where(num_splits == 1, EMPTY, -EMPTY)  # so that parts can be added first
    result = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), nothing)
    tl.store(log_sums + _split_statistics(tile, sizes), result, mask=tile.mask)  # [BQ, 16]


@triton.jit(do_not_specialize=Sizes._fields)
def composed_weights(
    x, log_sum, pre_query, pre_key, pre_base, post_query, post_key, post_base, key_mask,
    num_instances, num_groups, H, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key, window,
    num_splits, num_keys, KIND: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, BQ: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """Scores to composed weights, in place."""
    sizes = Sizes(
        num_instances, num_groups, H, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
        window, num_splits,
    )  # fmt: skip
    tile = _query_tile(sizes, num_keys, KIND, BQ, BK)
    pre_vectors, pre = _query_side(pre_query, pre_base, tile, sizes, BQ, PRE.QUERY_RANK, PRE.QUERY_GATE, PRE.BASE, KIND)
    HAS_PRE: tl.constexpr = PRE.QUERY_RANK + PRE.QUERY_GATE + PRE.BASE > 0
    post_vectors, post = _query_side(
        post_query, post_base, tile, sizes, BQ, POST.QUERY_RANK, POST.QUERY_GATE, POST.BASE, KIND
    )
    HAS_POST: tl.constexpr = POST.QUERY_RANK + POST.QUERY_GATE + POST.BASE > 0
    sums = group_sum(BQ, KIND)
    log_sums = tl.load(log_sum + _statistics(tile, sizes), mask=tile.mask, other=EMPTY)[:, None, :]  # [BQ, 1, 16]
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BK)
    for start in range(low, high, BK):
        keys = _key_tile(start, tile, sizes, num_keys, key_mask, KIND, BK)
        x_dot = tl.load(x + keys.place, mask=keys.inside, other=0.0).to(KIND.DOT)  # [BQ, BK, 16]
        pre_keys = _key_side(pre_key, keys, tile, sizes, PRE.KEY_RANK, PRE.KEY_GATE)
        post_keys = _key_side(post_key, keys, tile, sizes, POST.KEY_RANK, POST.KEY_GATE)
        y = mix(x_dot.to(tl.float32), x_dot, pre, pre_keys, sums, HAS_PRE, PRE.KEY_RANK, PRE.KEY_GATE)
        weights = tl.exp2(exponents(y, keys.bias, keys.seen, KIND) - log_sums)
        composed = mix(weights, weights.to(KIND.DOT), post, post_keys, sums, HAS_POST, POST.KEY_RANK, POST.KEY_GATE)
        tl.store(x + keys.place, composed.to(x.dtype.element_ty), mask=keys.inside)  # [BQ, BK, 16]
    if tile.split == 0:
        store_zeros(x + tile.offsets, 0, tile.low, num_keys, tile.mask, BK)
        store_zeros(x + tile.offsets, (tile.high + BK - 1) // BK * BK, num_keys, num_keys, tile.mask, BK)


@triton.jit(do_not_specialize=Sizes._fields)
def post_gradients(
    x, da, log_sum, row_sums, pre_query, pre_key, pre_base, post_query, post_key, post_base, d_post_query, d_post_base,
    key_mask, num_instances, num_groups, H, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
    first_key, window, num_splits, num_keys, KIND: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The sums sum_j P dP; gradients of the post-composition's query side and base; of each split of the keys."""
    sizes = Sizes(
        num_instances, num_groups, H, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
        window, num_splits,
    )  # fmt: skip
    tile = _query_tile(sizes, num_keys, KIND, BQ, BK)
    pre_vectors, pre = _query_side(pre_query, pre_base, tile, sizes, BQ, PRE.QUERY_RANK, PRE.QUERY_GATE, PRE.BASE, KIND)
    HAS_PRE: tl.constexpr = PRE.QUERY_RANK + PRE.QUERY_GATE + PRE.BASE > 0
    post_vectors, post = _query_side(
        post_query, post_base, tile, sizes, BQ, POST.QUERY_RANK, POST.QUERY_GATE, POST.BASE, KIND
    )
    HAS_POST: tl.constexpr = POST.QUERY_RANK + POST.QUERY_GATE + POST.BASE > 0
    post_back = tl.permute(post, (0, 2, 1))
    sums = group_sum(BQ, KIND)
    log_sums = tl.load(log_sum + _statistics(tile, sizes), mask=tile.mask, other=EMPTY)[:, None, :]  # [BQ, 1, 16]
    row_sum = tl.zeros([BQ, LANES, SLOTS], tl.float32)
    d_post = tl.zeros([BQ, SLOTS, SLOTS], tl.float32)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BK)
    for start in range(low, high, BK):
        keys = _key_tile(start, tile, sizes, num_keys, key_mask, KIND, BK)
        x_dot = tl.load(x + keys.place, mask=keys.inside, other=0.0).to(KIND.DOT)  # [BQ, BK, 16]
        da_dot = tl.load(da + keys.place, mask=keys.inside, other=0.0).to(KIND.DOT)  # [BQ, BK, 16]
        pre_keys = _key_side(pre_key, keys, tile, sizes, PRE.KEY_RANK, PRE.KEY_GATE)
        post_keys = _key_side(post_key, keys, tile, sizes, POST.KEY_RANK, POST.KEY_GATE)
        y = mix(x_dot.to(tl.float32), x_dot, pre, pre_keys, sums, HAS_PRE, PRE.KEY_RANK, PRE.KEY_GATE)
        weights = tl.exp2(exponents(y, keys.bias, keys.seen, KIND) - log_sums)
        d_weights = mix(
            da_dot.to(tl.float32), da_dot, post_back, post_keys, sums, HAS_POST, POST.KEY_RANK, POST.KEY_GATE, BACK=True
        )
        row_sum += tl.sum(within_threads(weights * d_weights), 1)
        if HAS_POST:
            d_post = outer_sum(weights.to(KIND.DOT), da_dot, d_post)
    tl.store(row_sums + _split_statistics(tile, sizes), tl.sum(row_sum, 1), mask=tile.mask)  # [BQ, 16]
    if POST.QUERY_RANK + POST.QUERY_GATE > 0:
        pointers = d_post_query + _split_weights(tile, sizes, 2 * POST.QUERY_RANK + POST.QUERY_GATE)
        store_vector_gradients(
            d_post, post_vectors, pointers, tile.width, tile.weight_mask, POST.QUERY_RANK, POST.QUERY_GATE, KIND
        )
    if POST.BASE:
        _store_base_sum(d_post, d_post_base)


@triton.jit(do_not_specialize=Sizes._fields)
def pre_gradients(
    x, da, log_sum, row_sum, pre_query, pre_key, pre_base, post_query, post_key, post_base, d_pre_query, d_pre_base,
    key_mask, num_instances, num_groups, H, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
    first_key, window, num_splits, num_keys, KIND: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gradients of the pre-composition's query side and base, of each split of the keys; x -> A, da -> dX in place."""
    sizes = Sizes(
        num_instances, num_groups, H, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
        window, num_splits,
    )  # fmt: skip
    tile = _query_tile(sizes, num_keys, KIND, BQ, BK)
    pre_vectors, pre = _query_side(pre_query, pre_base, tile, sizes, BQ, PRE.QUERY_RANK, PRE.QUERY_GATE, PRE.BASE, KIND)
    HAS_PRE: tl.constexpr = PRE.QUERY_RANK + PRE.QUERY_GATE + PRE.BASE > 0
    post_vectors, post = _query_side(
        post_query, post_base, tile, sizes, BQ, POST.QUERY_RANK, POST.QUERY_GATE, POST.BASE, KIND
    )
    HAS_POST: tl.constexpr = POST.QUERY_RANK + POST.QUERY_GATE + POST.BASE > 0
    pre_back, post_back = tl.permute(pre, (0, 2, 1)), tl.permute(post, (0, 2, 1))
    sums = group_sum(BQ, KIND)
    log_sums = tl.load(log_sum + _statistics(tile, sizes), mask=tile.mask, other=EMPTY)[:, None, :]  # [BQ, 1, 16]
    row_sums = tl.load(row_sum + _statistics(tile, sizes), mask=tile.mask, other=0.0)[:, None, :]  # [BQ, 1, 16]
    d_pre = tl.zeros([BQ, SLOTS, SLOTS], tl.float32)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BK)
    for start in range(low, high, BK):
        keys = _key_tile(start, tile, sizes, num_keys, key_mask, KIND, BK)
        x_dot = tl.load(x + keys.place, mask=keys.inside, other=0.0).to(KIND.DOT)  # [BQ, BK, 16]
        da_dot = tl.load(da + keys.place, mask=keys.inside, other=0.0).to(KIND.DOT)  # [BQ, BK, 16]
        pre_keys = _key_side(pre_key, keys, tile, sizes, PRE.KEY_RANK, PRE.KEY_GATE)
        post_keys = _key_side(post_key, keys, tile, sizes, POST.KEY_RANK, POST.KEY_GATE)
        y = mix(x_dot.to(tl.float32), x_dot, pre, pre_keys, sums, HAS_PRE, PRE.KEY_RANK, PRE.KEY_GATE)
        weights = tl.exp2(exponents(y, keys.bias, keys.seen, KIND) - log_sums)
        composed = mix(weights, weights.to(KIND.DOT), post, post_keys, sums, HAS_POST, POST.KEY_RANK, POST.KEY_GATE)
        tl.store(x + keys.place, composed.to(x.dtype.element_ty), mask=keys.inside)  # [BQ, BK, 16]
        d_weights = mix(
            da_dot.to(tl.float32), da_dot, post_back, post_keys, sums, HAS_POST, POST.KEY_RANK, POST.KEY_GATE, BACK=True
        )
        dy = weights * (d_weights - row_sums)
        dy_dot = dy.to(KIND.DOT)
        if HAS_PRE:
            d_pre = outer_sum(x_dot, dy_dot, d_pre)
        dx = mix(dy, dy_dot, pre_back, pre_keys, sums, HAS_PRE, PRE.KEY_RANK, PRE.KEY_GATE, BACK=True)
        tl.store(da + keys.place, dx.to(da.dtype.element_ty), mask=keys.inside)  # [BQ, BK, 16]
    if tile.split == 0:
        for workspace in tl.static_range(2):
            pointers = (x if workspace == 0 else da) + tile.offsets
            store_zeros(pointers, 0, tile.low, num_keys, tile.mask, BK)
            store_zeros(pointers, (tile.high + BK - 1) // BK * BK, num_keys, num_keys, tile.mask, BK)
    if PRE.QUERY_RANK + PRE.QUERY_GATE > 0:
        pointers = d_pre_query + _split_weights(tile, sizes, 2 * PRE.QUERY_RANK + PRE.QUERY_GATE)
        store_vector_gradients(
            d_pre, pre_vectors, pointers, tile.width, tile.weight_mask, PRE.QUERY_RANK, PRE.QUERY_GATE, KIND
        )
    if PRE.BASE:
        _store_base_sum(d_pre, d_pre_base)


@triton.jit(do_not_specialize=Sizes._fields)
def key_gradients(
    x, da, log_sum, row_sum, pre_query, pre_key, pre_base, post_query, post_key, post_base, d_pre_key, d_post_key,
    key_mask, num_instances, num_groups, H, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
    first_key, window, num_splits, num_keys, KIND: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Gradients of the key side of both compositions, of each block and each split of its queries.

    Keys are the matrix side, queries the vector side.
    """
    num_tiles = tl.cdiv(num_keys, BK)
    tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles % (num_blocks * num_splits)
    slots = slots_of(tl.program_id(0) // num_tiles // (num_blocks * num_splits), num_instances, num_groups, KIND)
    number, split = part // num_splits, part % num_splits
    row, width = slots.row + row0, num_groups * KIND.GROUP_SLOTS
    key = tile * BK + tl.arange(0, BK)
    key0 = first_key + number * block
    token = key0 + key
    real = ((key < num_keys) & (token >= 0) & (token < S))[:, None] & slots.is_instance[None, :]  # [BK, 16]
    plane = (slots.row * H + slots.head) * plane_blocks + number
    offsets = (plane * block)[None, :] * num_keys + key[:, None]  # offsets of the keys' first queries [BK, 16]
    pre_vectors = load_vectors(pre_key, row, S, token, real, slots, width, PRE.KEY_RANK, PRE.KEY_GATE)
    pre = token_matrices(pre_vectors, pre_base, slots, BK, PRE.KEY_RANK, PRE.KEY_GATE, PRE.BASE, KIND)
    HAS_PRE: tl.constexpr = PRE.KEY_RANK + PRE.KEY_GATE + PRE.BASE > 0
    post_vectors = load_vectors(post_key, row, S, token, real, slots, width, POST.KEY_RANK, POST.KEY_GATE)
    post = token_matrices(post_vectors, post_base, slots, BK, POST.KEY_RANK, POST.KEY_GATE, POST.BASE, KIND)
    HAS_POST: tl.constexpr = POST.KEY_RANK + POST.KEY_GATE + POST.BASE > 0
    post_back = tl.permute(post, (0, 2, 1))
    sums = group_sum(BK, KIND)
    d_pre = tl.zeros([BK, SLOTS, SLOTS], tl.float32)
    d_post = tl.zeros([BK, SLOTS, SLOTS], tl.float32)
    position0 = query0 + number * block + S - T
    first = key0 + tile * BK
    num_real = tl.minimum(block, num_queries - number * block)
    low, high = query_bounds(first, first + BK - 1, num_real, position0, window, KIND, BQ)
    low, high = split_range(low, high, split, num_splits, BQ)
    for start in range(low, high, BQ):
        in_block = tl.multiple_of(start, BQ) + tl.arange(0, BQ)
        query = query0 + number * block + in_block
        is_query = in_block < num_real
        mask, weight_mask = is_query[:, None] & slots.is_real[None, :], is_query[:, None] & slots.is_instance[None, :]
        bias = hidden_bias((position0 + in_block)[None, :], token[:, None], S, window, KIND)[:, :, None]  # [BK, BQ, 1]
        seen = real
        if KIND.HAS_MASK:
            seen = mask_of_keys(key_mask, row, slots.is_instance, token, S, KIND)
        inside = ((key < num_keys)[:, None] & slots.is_real[None, :])[:, None, :] & is_query[None, :, None]
        place = offsets[:, None, :] + (in_block * num_keys)[None, :, None]
        x_dot = tl.load(x + place, mask=inside, other=0.0).to(KIND.DOT)  # [BK, BQ, 16]
        da_dot = tl.load(da + place, mask=inside, other=0.0).to(KIND.DOT)  # [BK, BQ, 16]
        pre_queries = load_vectors(pre_query, row, T, query, weight_mask, slots, width, PRE.QUERY_RANK, PRE.QUERY_GATE)
        post_queries = load_vectors(
            post_query, row, T, query, weight_mask, slots, width, POST.QUERY_RANK, POST.QUERY_GATE
        )
        statistics = ((row.to(tl.int64) * H + slots.head) * T)[None, :] + query[:, None]
        log_sums = tl.load(log_sum + statistics, mask=mask, other=EMPTY)[None, :, :]  # [1, BQ, 16]
        row_sums = tl.load(row_sum + statistics, mask=mask, other=0.0)[None, :, :]  # [1, BQ, 16]
        y = mix(x_dot.to(tl.float32), x_dot, pre, pre_queries, sums, HAS_PRE, PRE.QUERY_RANK, PRE.QUERY_GATE)
        weights = tl.exp2(exponents(y, bias, seen[:, None, :], KIND) - log_sums)
        if POST.KEY_RANK + POST.KEY_GATE > 0:
            d_post = outer_sum(weights.to(KIND.DOT), da_dot, d_post)
        if PRE.KEY_RANK + PRE.KEY_GATE > 0:
            d_weights = mix(
                da_dot.to(tl.float32), da_dot, post_back, post_queries, sums, HAS_POST, POST.QUERY_RANK,
                POST.QUERY_GATE, BACK=True,
            )  # fmt: skip
            dy = weights * (d_weights - row_sums)
            d_pre = outer_sum(x_dot, dy.to(KIND.DOT), d_pre)
    place = split * (num_instances // num_groups) + slots.row
    place = ((place * num_blocks + number) * num_keys)[None, :] + key[:, None]
    stored = (key < num_keys)[:, None] & slots.is_instance[None, :]
    if PRE.KEY_RANK + PRE.KEY_GATE > 0:
        pointers = d_pre_key + place.to(tl.int64) * (2 * PRE.KEY_RANK + PRE.KEY_GATE) * width + slots.column[None, :]
        store_vector_gradients(d_pre, pre_vectors, pointers, width, stored, PRE.KEY_RANK, PRE.KEY_GATE, KIND)
    if POST.KEY_RANK + POST.KEY_GATE > 0:
        pointers = d_post_key + place.to(tl.int64) * (2 * POST.KEY_RANK + POST.KEY_GATE) * width + slots.column[None, :]
        store_vector_gradients(d_post, post_vectors, pointers, width, stored, POST.KEY_RANK, POST.KEY_GATE, KIND)
