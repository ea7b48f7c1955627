"""The two kernels for few queries over many keys, as in decoding: each reads its part of the cache once, in place.

    decode_scores     q, k -> composed exponents of 2, and the log-sums for each split of the keys
    decode_outputs    exponents, log-sums, v -> what each split of the keys adds to the output

Compose weights are not packed: the sides of `pre` and `post` are `SideWeights`. Keys and values are loaded only if a
boolean mask makes them visible to a query of the tile, so the empty slots of a cache cost nothing.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim; of a tile: BLOCK_M queries, BLOCK_N keys, STEP channels

import triton
import triton.language as tl

from .head_mixing import SLOTS, group_sum, load_side, mix, split_range, to_dot, token_matrices
from .indexing import Sizes, key_step, query_tile
from .masking import exponents, weights_of
from .softmax_stats import EMPTY, along_keys, empty_stats, lse_of, store_statistics, update_stats


@triton.jit
def _query_vectors(side, tile, sizes, SPEC: tl.constexpr, KIND: tl.constexpr):
    """Load the weights of a tile's queries as vectors [BLOCK_M, 16]."""
    row, token = tile.slots.row + sizes.row0, sizes.query0 + tile.query
    R: tl.constexpr = SPEC.QUERY_RANK
    return load_side(side, row, sizes.T, token, tile.mask, tile.slots, sizes.H, R, SPEC.QUERY_GATE, KIND)


@triton.jit
def _key_vectors(side, step, seen, tile, sizes, SPEC: tl.constexpr, KIND: tl.constexpr):
    """Load the weights of a step's keys as vectors [BLOCK_N, 16]."""
    row = tile.slots.row + sizes.row0
    R: tl.constexpr = SPEC.KEY_RANK
    return load_side(side, row, sizes.S, step.token, seen, tile.slots, sizes.H, R, SPEC.KEY_GATE, KIND)


@triton.jit
def _seen_keys(step, tile, KIND: tl.constexpr):
    """Tell which keys some query of a tile may see with any of its heads, which are mixed: per block [BLOCK_N, 16]."""
    wanted = step.real
    if KIND.MASK == 1:
        visible = tl.max((step.pairs[0] != 0).to(tl.int32), 0)  # [BLOCK_N, 16 or 1]
        if KIND.MASK_HEADS:
            for b in tl.static_range(1, tl.constexpr(KIND.BLOCKS)):
                visible = tl.maximum(visible, tl.max((step.pairs[b] != 0).to(tl.int32), 0))
            visible = tl.max(visible, 1)[:, None]
        wanted = wanted & (visible > 0)
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (wanted & tile.slots.is_real[b][None, :],)
    return result


@triton.jit
def _head_places(tile, sizes, row_stride, head_stride, B: tl.constexpr):
    """Offsets of block B's heads in keys or values [16]; equal for heads that share keys."""
    row, head = (tile.slots.row + sizes.row0).to(tl.int64), (tile.slots.head[B] // sizes.shared).to(tl.int64)
    return row * row_stride + head * head_stride


@triton.jit
def _load_channels(x, heads, tokens, token_stride, seen, C: tl.constexpr, D: tl.constexpr, STEP: tl.constexpr):
    """Load part C of the channels of keys or values [1, BLOCK_N, 16, STEP].

    Heads are declared more contiguous than keys, so that all versions of Triton distribute threads along heads first:
    sums over keys stay within threads.
    """
    channel = C * STEP + tl.arange(0, STEP)
    rows = (tokens.to(tl.int64) * token_stride)[:, None] + heads[None, :]
    pointers = tl.max_contiguous(x + rows[None, :, :, None] + channel[None, None, None, :], [1, 1, 2, STEP])
    inside = seen[None, :, :, None]
    if D % STEP != 0:
        inside = inside & (channel < D)[None, None, None, :]
    return tl.load(pointers, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scores(
    q, k, strides, scale, tile, step, seen, sizes, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    STEP: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Multiply queries and keys: per block [BLOCK_M, BLOCK_N, 16]."""
    COUNT: tl.constexpr = (D + STEP - 1) // STEP
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        heads = _head_places(tile, sizes, strides[0], strides[1], b)
        plane = (tile.slots.row + sizes.row0).to(tl.int64) * sizes.H + tile.slots.head[b]
        queries = (plane * sizes.T)[None, :] + (sizes.query0 + tile.query)[:, None]
        total = tl.zeros([BLOCK_M, BLOCK_N, SLOTS], tl.float32)
        for c in tl.static_range(COUNT):
            channel = c * STEP + tl.arange(0, STEP)
            inside = tile.mask[b][:, None, :, None] & (channel < D)[None, None, None, :]
            pointers = q + (queries * D)[:, None, :, None] + channel[None, None, None, :]  # [BLOCK_M, 1, 16, STEP]
            of_keys = _load_channels(k, heads, step.token, strides[2], seen[b], c, D, STEP)
            total += tl.sum(of_keys * tl.load(pointers, mask=inside, other=0.0).to(tl.float32), 3)
        result = result + (total * scale,)
    return result


@triton.jit(do_not_specialize=Sizes._fields)
def decode_scores(
    q, k, x, lse, k_row, k_head, k_token, scale, pre, masks,
    num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    num_keys, KIND: tl.constexpr, PRE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Store the composed scores as exponents of 2 in `x`, and their log-sum-exp per split, -inf without visible
    keys."""
    sizes = Sizes(
        num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
        first_key, window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    )  # fmt: skip
    tile = query_tile(masks, sizes, num_keys, KIND, BLOCK_M, BLOCK_N)
    matrices = token_matrices(
        _query_vectors(pre.query, tile, sizes, PRE, KIND), pre.base, tile.slots, BLOCK_M, PRE, True, KIND
    )
    sums = group_sum(BLOCK_M, KIND)
    running = empty_stats(BLOCK_M, KIND)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        step = key_step(start, tile, masks, sizes, num_keys, KIND, BLOCK_N)
        seen = _seen_keys(step, tile, KIND)
        scores = _scores(
            q, k, (k_row, k_head, k_token), scale, tile, step, seen, sizes, BLOCK_M, BLOCK_N, D, STEP, KIND
        )
        vectors = _key_vectors(pre.key, step, seen, tile, sizes, PRE, KIND)
        y = mix(scores, to_dot(scores, KIND), matrices, vectors, sums, PRE, True, KIND)
        exponent = exponents(y, step.bias, step.pairs, KIND)
        running = update_stats(running, exponent, KIND)
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            tl.store(x + step.place[b], exponent[b], mask=step.inside[b])
    store_statistics(lse, tile, sizes, lse_of(running, -float("inf"), KIND), KIND)


@triton.jit
def _total_lse(lse, tile, sizes, BLOCK_M: tl.constexpr, KIND: tl.constexpr):
    """Combine the log-sum-exps of all splits: per block [BLOCK_M, 1, 16]."""
    num_rows = sizes.num_instances // sizes.num_groups
    running = empty_stats(BLOCK_M, KIND)
    for start in range(0, sizes.num_splits, SLOTS):
        split = start + tl.arange(0, SLOTS)
        parts = ()
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            plane = (split[:, None] * num_rows + tile.slots.row[None, :]) * sizes.H + tile.slots.head[b][None, :]
            places = (plane * sizes.num_queries)[None, :, :] + tile.query[:, None, None]
            inside = tile.mask[b][:, None, :] & (split < sizes.num_splits)[None, :, None]
            parts = parts + (tl.load(lse + places, mask=inside, other=-float("inf")),)
        running = update_stats(running, parts, KIND)
    return along_keys(lse_of(running, EMPTY, KIND), KIND)


@triton.jit(do_not_specialize=Sizes._fields)
def decode_outputs(
    x, lse, v, outputs, v_row, v_head, v_token, post, masks,
    num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    num_keys, KIND: tl.constexpr, POST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Store composed weights times values per split in `outputs` [num_splits, rows, H, queries, D]."""
    sizes = Sizes(
        num_instances, num_groups, H, shared, row0, T, S, query0, num_queries, block, num_blocks, plane_blocks,
        first_key, window_size, num_splits, mask_row, mask_head, mask_query, mask_key, threshold, keep_scale,
    )  # fmt: skip
    tile = query_tile(masks, sizes, num_keys, KIND, BLOCK_M, BLOCK_N)
    matrices = token_matrices(
        _query_vectors(post.query, tile, sizes, POST, KIND), post.base, tile.slots, BLOCK_M, POST, True, KIND
    )
    sums = group_sum(BLOCK_M, KIND)
    whole = _total_lse(lse, tile, sizes, BLOCK_M, KIND)
    COUNT: tl.constexpr = (D + STEP - 1) // STEP
    totals = ()
    for _ in tl.static_range(tl.constexpr(KIND.BLOCKS * COUNT)):
        totals = totals + (tl.zeros([BLOCK_M, SLOTS, STEP], tl.float32),)
    low, high = split_range(tile.low, tile.high, tile.split, num_splits, BLOCK_N)
    for start in range(low, high, BLOCK_N):
        step = key_step(start, tile, masks, sizes, num_keys, KIND, BLOCK_N)
        seen = _seen_keys(step, tile, KIND)
        exponent = ()
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            exponent = exponent + (tl.load(x + step.place[b], mask=step.inside[b], other=-float("inf")),)
        weights = weights_of(exponent, whole, KIND)
        vectors = _key_vectors(post.key, step, seen, tile, sizes, POST, KIND)
        composed = mix(weights, to_dot(weights, KIND), matrices, vectors, sums, POST, True, KIND)
        added = ()
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            heads = _head_places(tile, sizes, v_row, v_head, b)
            for c in tl.static_range(COUNT):
                values = _load_channels(v, heads, step.token, v_token, seen[b], c, D, STEP)
                added = added + (totals[b * COUNT + c] + tl.sum(composed[b][:, :, :, None] * values, 1),)
        totals = added
    num_rows = num_instances // num_groups
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        plane = (tile.split * num_rows + tile.slots.row).to(tl.int64) * H + tile.slots.head[b]
        places = ((plane * num_queries)[None, :] + tile.query[:, None]) * D
        for c in tl.static_range(COUNT):
            channel = c * STEP + tl.arange(0, STEP)
            inside = tile.mask[b][:, :, None] & (channel < D)[None, None, :]
            tl.store(outputs + places[:, :, None] + channel[None, None, :], totals[b * COUNT + c], mask=inside)
