"""The five kernels that mix heads on a chunk of scores: two forward, three backward.

A chunk is a range of batch rows and of queries. The workspace `x` holds its scaled scores, [rows, H, blocks, Q, K]:
each block of Q queries with its K visible keys (one block, or several with a window). `da`, of the same shape, holds
the gradient of the composed weights. Library products write and read them. `lse` [B, H, T] is in base 2; `delta` is
sum_j P dP, where P are the attention weights. Partial sums of programs are stored and added in a fixed order.

    row_statistics      x -> lse
    composed_weights    x -> A, in place
    post_gradients      x, da -> delta, gradients of the query side of the post-composition
    key_gradients       x, da -> gradients of the key side of both compositions
    pre_gradients       x, da -> gradients of the query side of the pre-composition; x -> A, da -> dX, in place; dY

The numbers among a kernel's arguments, except `num_keys`, are fields of `Sizes`; the tuple is built within the kernel,
because Triton specializes kernels on the values in a tuple argument.
"""

# B batch, T query tokens, S key tokens, H heads, Q queries and K keys of a block; of a tile: BLOCK_M queries, BLOCK_N
# keys

import triton
import triton.language as tl

from .head_mixing import (
    LANES,
    SLOTS,
    add_gradients,
    group_sum,
    load_tile,
    mix,
    split_range,
    store_base_sum,
    store_tile,
    store_vector_gradients,
    store_zeros,
    to_dot,
    to_float,
    transposed,
    within_threads,
    zero_gradients,
)
from .indexing import (
    Sizes,
    key_side,
    key_step,
    key_tile,
    key_vectors,
    key_weight_places,
    own_key_vectors,
    own_query_vectors,
    query_side,
    query_step,
    query_tile,
    query_vectors,
    query_weight_places,
)
from .masking import drop, exponents, weights_of
from .softmax_stats import (
    EMPTY,
    along_keys,
    empty_stats,
    load_statistics,
    lse_of,
    store_statistics,
    update_stats,
)


@triton.jit
def _zero_rows(workspace, tile, num_keys, BLOCK_N: tl.constexpr, KIND: tl.constexpr):
    """Write zeros to the keys of a tile's queries that its loop does not cover."""
    if tile.split == 0:
        store_zeros(workspace, tile.offsets, 0, tile.low, num_keys, tile.mask, BLOCK_N, KIND)
        covered = tile.low + tl.cdiv(tile.high - tile.low, BLOCK_N) * BLOCK_N
        store_zeros(workspace, tile.offsets, covered, num_keys, num_keys, tile.mask, BLOCK_N, KIND)


@triton.jit(do_not_specialize=Sizes._fields)
def row_statistics(
    x, lse, pre, masks,
    num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    num_keys, KIND: tl.constexpr, PRE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the base-2 log-sum-exp of the composed scores, per query and head, for each split of the keys."""
    sizes = Sizes(
        num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
        first_key, window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    )  # fmt: skip
    tile = query_tile(masks, sizes, num_keys, KIND, BLOCK_M, BLOCK_N)
    pre_matrices = query_side(pre, tile, sizes, BLOCK_M, PRE, KIND)
    sums = group_sum(BLOCK_M, KIND)
    running = empty_stats(BLOCK_M, KIND)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        keys = key_step(start, tile, masks, sizes, num_keys, KIND, BLOCK_N)
        x_dot = load_tile(x, keys.place, keys.inside, KIND)
        pre_keys = key_vectors(pre, keys, tile, sizes, PRE, KIND)
        y = mix(to_float(x_dot, KIND), x_dot, pre_matrices, pre_keys, sums, PRE, True, KIND)
        running = update_stats(running, exponents(y, keys.bias, keys.pairs, KIND), KIND)
    nothing = tl.where(num_splits == 1, EMPTY, -EMPTY)  # so that splits can be combined
    store_statistics(lse, tile, sizes, lse_of(running, nothing, KIND), KIND)


@triton.jit(do_not_specialize=Sizes._fields)
def composed_weights(
    x, lse, pre, post, masks,
    num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    num_keys, KIND: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Convert scores to composed weights, in place."""
    sizes = Sizes(
        num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
        first_key, window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    )  # fmt: skip
    tile = query_tile(masks, sizes, num_keys, KIND, BLOCK_M, BLOCK_N)
    pre_matrices = query_side(pre, tile, sizes, BLOCK_M, PRE, KIND)
    post_matrices = query_side(post, tile, sizes, BLOCK_M, POST, KIND)
    sums = group_sum(BLOCK_M, KIND)
    query = sizes.query0 + tile.query
    row_lse = along_keys(load_statistics(lse, tile.slots, query, tile.mask, sizes, EMPTY, KIND), KIND)
    words = along_keys(tile.words, KIND)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        keys = key_step(start, tile, masks, sizes, num_keys, KIND, BLOCK_N)
        x_dot = load_tile(x, keys.place, keys.inside, KIND)
        pre_keys = key_vectors(pre, keys, tile, sizes, PRE, KIND)
        post_keys = key_vectors(post, keys, tile, sizes, POST, KIND)
        y = mix(to_float(x_dot, KIND), x_dot, pre_matrices, pre_keys, sums, PRE, True, KIND)
        weights = weights_of(exponents(y, keys.bias, keys.pairs, KIND), row_lse, KIND)
        composed = mix(weights, to_dot(weights, KIND), post_matrices, post_keys, sums, POST, True, KIND)
        if KIND.HAS_DROPOUT:
            composed = drop(composed, words, keys.words, sizes, KIND)
        store_tile(x, keys.place, keys.inside, composed, KIND)
    _zero_rows(x, tile, num_keys, BLOCK_N, KIND)


@triton.jit(do_not_specialize=Sizes._fields)
def post_gradients(
    x, da, lse, delta, d_post_query, d_post_base, pre, post, masks,
    num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    num_keys, KIND: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The sums sum_j P dP; gradients of the post-composition's query side and base; for each split of the keys."""
    sizes = Sizes(
        num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
        first_key, window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    )  # fmt: skip
    tile = query_tile(masks, sizes, num_keys, KIND, BLOCK_M, BLOCK_N)
    pre_matrices = query_side(pre, tile, sizes, BLOCK_M, PRE, KIND)
    post_matrices = query_side(post, tile, sizes, BLOCK_M, POST, KIND)
    post_back = transposed(post_matrices, POST, KIND)
    sums = group_sum(BLOCK_M, KIND)
    query = sizes.query0 + tile.query
    row_lse = along_keys(load_statistics(lse, tile.slots, query, tile.mask, sizes, EMPTY, KIND), KIND)
    words = along_keys(tile.words, KIND)
    delta_sums = ()
    for _ in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        delta_sums = delta_sums + (tl.zeros([BLOCK_M, LANES, SLOTS], tl.float32),)
    d_post = zero_gradients(BLOCK_M, POST, KIND)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        keys = key_step(start, tile, masks, sizes, num_keys, KIND, BLOCK_N)
        x_dot = load_tile(x, keys.place, keys.inside, KIND)
        da_dot = load_tile(da, keys.place, keys.inside, KIND)
        pre_keys = key_vectors(pre, keys, tile, sizes, PRE, KIND)
        post_keys = key_vectors(post, keys, tile, sizes, POST, KIND)
        if KIND.HAS_DROPOUT:
            da_dot = to_dot(drop(da_dot, words, keys.words, sizes, KIND), KIND)
        y = mix(to_float(x_dot, KIND), x_dot, pre_matrices, pre_keys, sums, PRE, True, KIND)
        weights = weights_of(exponents(y, keys.bias, keys.pairs, KIND), row_lse, KIND)
        d_weights = mix(to_float(da_dot, KIND), da_dot, post_back, post_keys, sums, POST, True, KIND, BACK=True)
        added = ()
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            added = added + (delta_sums[b] + tl.sum(within_threads(weights[b] * d_weights[b]), 1),)
        delta_sums = added
        if POST.QUERY_RANK + POST.QUERY_GATE + POST.BASE > 0:
            weights_dot, da_wide = to_dot(weights, KIND), to_float(da_dot, KIND)
            d_post = add_gradients(weights, weights_dot, da_wide, da_dot, post_matrices, d_post, POST, True, KIND)
    whole = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        whole = whole + (tl.sum(delta_sums[b], 1),)
    store_statistics(delta, tile, sizes, whole, KIND)
    COUNT: tl.constexpr = 2 * POST.QUERY_RANK + POST.QUERY_GATE
    if COUNT > 0:
        vectors = own_query_vectors(post, tile, sizes, POST, KIND, AGAIN=True)
        store_vector_gradients(
            d_post, vectors, d_post_query, query_weight_places(tile, sizes, COUNT), tile.slots, tile.width,
            tile.weight_mask, POST, True, KIND,
        )  # fmt: skip
    if POST.BASE:
        store_base_sum(d_post, d_post_base, KIND)


@triton.jit(do_not_specialize=Sizes._fields)
def pre_gradients(
    x, da, dy, lse, delta, d_pre_query, d_pre_base, pre, post, masks,
    num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    num_keys, KIND: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of the pre-composition's query side and base, for each split of the keys; x -> A, da -> dX in place.

    If the mask requires a gradient, the gradient of the composed scores is stored in the workspace `dy`.
    """
    sizes = Sizes(
        num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
        first_key, window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    )  # fmt: skip
    tile = query_tile(masks, sizes, num_keys, KIND, BLOCK_M, BLOCK_N)
    pre_matrices = query_side(pre, tile, sizes, BLOCK_M, PRE, KIND)
    post_matrices = query_side(post, tile, sizes, BLOCK_M, POST, KIND)
    pre_back, post_back = transposed(pre_matrices, PRE, KIND), transposed(post_matrices, POST, KIND)
    sums = group_sum(BLOCK_M, KIND)
    query = sizes.query0 + tile.query
    row_lse = along_keys(load_statistics(lse, tile.slots, query, tile.mask, sizes, EMPTY, KIND), KIND)
    row_delta = along_keys(load_statistics(delta, tile.slots, query, tile.mask, sizes, 0.0, KIND), KIND)
    words = along_keys(tile.words, KIND)
    d_pre = zero_gradients(BLOCK_M, PRE, KIND)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        keys = key_step(start, tile, masks, sizes, num_keys, KIND, BLOCK_N)
        x_dot = load_tile(x, keys.place, keys.inside, KIND)
        pre_keys = key_vectors(pre, keys, tile, sizes, PRE, KIND)
        y = mix(to_float(x_dot, KIND), x_dot, pre_matrices, pre_keys, sums, PRE, True, KIND)
        weights = weights_of(exponents(y, keys.bias, keys.pairs, KIND), row_lse, KIND)
        post_keys = key_vectors(post, keys, tile, sizes, POST, KIND)
        composed = mix(weights, to_dot(weights, KIND), post_matrices, post_keys, sums, POST, True, KIND)
        if KIND.HAS_DROPOUT:
            composed = drop(composed, words, keys.words, sizes, KIND)
        store_tile(x, keys.place, keys.inside, composed, KIND)
        da_dot = load_tile(da, keys.place, keys.inside, KIND)
        if KIND.HAS_DROPOUT:
            da_dot = to_dot(drop(da_dot, words, keys.words, sizes, KIND), KIND)
        d_weights = mix(to_float(da_dot, KIND), da_dot, post_back, post_keys, sums, POST, True, KIND, BACK=True)
        d_scores = _through_softmax(weights, d_weights, row_delta, KIND)
        if KIND.MASK_GRADIENT:
            store_tile(dy, keys.place, keys.inside, d_scores, KIND)
        d_dot = to_dot(d_scores, KIND)
        if PRE.QUERY_RANK + PRE.QUERY_GATE + PRE.BASE > 0:
            x_wide = to_float(x_dot, KIND)
            d_pre = add_gradients(x_wide, x_dot, d_scores, d_dot, pre_matrices, d_pre, PRE, True, KIND)
        dx = mix(d_scores, d_dot, pre_back, pre_keys, sums, PRE, True, KIND, BACK=True)
        store_tile(da, keys.place, keys.inside, dx, KIND)
    _zero_rows(x, tile, num_keys, BLOCK_N, KIND)
    _zero_rows(da, tile, num_keys, BLOCK_N, KIND)
    if KIND.MASK_GRADIENT:
        _zero_rows(dy, tile, num_keys, BLOCK_N, KIND)
    COUNT: tl.constexpr = 2 * PRE.QUERY_RANK + PRE.QUERY_GATE
    if COUNT > 0:
        vectors = own_query_vectors(pre, tile, sizes, PRE, KIND, AGAIN=True)
        store_vector_gradients(
            d_pre, vectors, d_pre_query, query_weight_places(tile, sizes, COUNT), tile.slots, tile.width,
            tile.weight_mask, PRE, True, KIND,
        )  # fmt: skip
    if PRE.BASE:
        store_base_sum(d_pre, d_pre_base, KIND)


@triton.jit(do_not_specialize=Sizes._fields)
def key_gradients(
    x, da, lse, delta, d_pre_key, d_post_key, pre, post, masks,
    num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    num_keys, KIND: tl.constexpr, PRE: tl.constexpr, POST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradients of the key side of both compositions, of each block and each split of its queries.

    Keys are the matrix side, queries the vector side.
    """
    sizes = Sizes(
        num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
        first_key, window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    )  # fmt: skip
    tile = key_tile(masks, sizes, num_keys, KIND, BLOCK_M, BLOCK_N)
    pre_matrices = key_side(pre, tile, sizes, BLOCK_N, PRE, KIND)
    post_matrices = key_side(post, tile, sizes, BLOCK_N, POST, KIND)
    post_back = transposed(post_matrices, POST, KIND)
    sums = group_sum(BLOCK_N, KIND)
    PRE_COUNT: tl.constexpr = 2 * PRE.KEY_RANK + PRE.KEY_GATE
    POST_COUNT: tl.constexpr = 2 * POST.KEY_RANK + POST.KEY_GATE
    d_pre, d_post = zero_gradients(BLOCK_N, PRE, KIND), zero_gradients(BLOCK_N, POST, KIND)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BLOCK_M)
    for start in range(low, high, BLOCK_M):
        queries = query_step(start, tile, masks, sizes, num_keys, KIND, BLOCK_M)
        x_dot = load_tile(x, queries.place, queries.inside, KIND)
        da_dot = load_tile(da, queries.place, queries.inside, KIND)
        pre_queries = query_vectors(pre, queries, tile, sizes, PRE, KIND)
        post_queries = query_vectors(post, queries, tile, sizes, POST, KIND)
        row_lse = load_statistics(lse, tile.slots, queries.query, queries.mask, sizes, EMPTY, KIND)
        row_delta = load_statistics(delta, tile.slots, queries.query, queries.mask, sizes, 0.0, KIND)
        y = mix(to_float(x_dot, KIND), x_dot, pre_matrices, pre_queries, sums, PRE, False, KIND)
        weights = weights_of(exponents(y, queries.bias, queries.pairs, KIND), _along_matrices(row_lse, KIND), KIND)
        if KIND.HAS_DROPOUT:
            da_dot = to_dot(drop(da_dot, _along_matrices(queries.words, KIND), tile.words, sizes, KIND), KIND)
        if POST_COUNT > 0:
            weights_dot, da_wide = to_dot(weights, KIND), to_float(da_dot, KIND)
            d_post = add_gradients(weights, weights_dot, da_wide, da_dot, post_matrices, d_post, POST, False, KIND)
        if PRE_COUNT > 0:
            d_weights = mix(to_float(da_dot, KIND), da_dot, post_back, post_queries, sums, POST, False, KIND, BACK=True)
            d_scores = _through_softmax(weights, d_weights, _along_matrices(row_delta, KIND), KIND)
            x_wide, d_dot = to_float(x_dot, KIND), to_dot(d_scores, KIND)
            d_pre = add_gradients(x_wide, x_dot, d_scores, d_dot, pre_matrices, d_pre, PRE, False, KIND)
    stored = (tile.key < num_keys)[:, None] & tile.slots.is_instance[None, :]
    if PRE_COUNT > 0:
        places = key_weight_places(tile, sizes, num_keys, PRE_COUNT)
        vectors = own_key_vectors(pre, tile, sizes, PRE, KIND, AGAIN=True)
        store_vector_gradients(d_pre, vectors, d_pre_key, places, tile.slots, tile.width, stored, PRE, False, KIND)
    if POST_COUNT > 0:
        places = key_weight_places(tile, sizes, num_keys, POST_COUNT)
        vectors = own_key_vectors(post, tile, sizes, POST, KIND, AGAIN=True)
        store_vector_gradients(d_post, vectors, d_post_key, places, tile.slots, tile.width, stored, POST, False, KIND)


@triton.jit
def _along_matrices(blocks, KIND: tl.constexpr):
    """Prepend an axis of keys to values of a step's queries, per block [BLOCK_M, 16]."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (blocks[b][None, :, :],)
    return result


@triton.jit
def _through_softmax(weights, d_weights, delta, KIND: tl.constexpr):
    """Backpropagate through the softmax: P (dP - sum_j P dP)."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (weights[b] * (d_weights[b] - delta[b]),)
    return result
