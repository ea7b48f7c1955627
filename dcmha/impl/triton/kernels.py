"""The five kernels that mix heads on a chunk of scores: two forward, three backward.

A chunk is a range of images and of queries. The workspace `x` holds its scaled scores, [images, H, blocks, C, K]: each
block of C queries with the K keys that it may see (one block, unless a window makes many); `da`, of the same shape, the
gradient of the composed weights. Library products make and use them. `log_sum` [B, H, T] is in base 2, `row_sum` is
sum_j P dP. What a program cannot sum by itself it stores, and the launch adds up in a fixed order.

    row_statistics      x -> log_sum
    composed_weights    x -> A, in place
    post_gradients      x, da -> row_sum, gradients of the query side of the post-composition
    key_gradients       x, da -> gradients of the key side of both compositions
    pre_gradients       x, da -> gradients of the query side of the pre-composition; x -> A, da -> dX, in place

PRE and POST tell whether the batch side (or a base) takes part in a composition.
"""

# B batch, T query tokens, S key tokens, H heads, P slots of a group

import triton
import triton.language as tl

from .tiles import (
    LANES,
    SLOTS,
    batch_matrices,
    exponents,
    group_sum,
    hidden_bias,
    key_bounds,
    load_weights,
    mask_of_keys,
    mix,
    outer_sum,
    query_bounds,
    slot_heads,
    split_range,
    store_weight_gradients,
    store_zeros,
    within_threads,
)

EMPTY = tl.constexpr(1e30)  # the log-sum of a query with no visible key: its weights become 0

# Sizes that differ from call to call: no kernel is compiled anew for them.
SIZES = [
    *("num_instances", "num_groups", "H", "image0", "T", "S", "query0", "num_queries", "block", "num_blocks"),
    *("plane_blocks", "first_key", "window", "num_splits"),
]


@triton.jit
def _query_tile(
    num_instances, num_groups, H, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key, num_keys,
    window, num_splits, P: tl.constexpr, HEADS: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Locate a program of the kernels whose batch side is the queries.

    Returns:
        local, head, column, is_instance, is_real: What each slot holds; images count from the chunk's first.
        query, is_query: Queries [BQ] of the program, counted from the chunk's first, and which of them there are.
        rows: Offsets of their rows in a workspace [BQ, 16].
        key0: Token of the block's first key.
        low, high: Range of the block's keys that they may see.
        split: Of that range, which of `num_splits` shares is the program's.
    """
    num_tiles = tl.cdiv(block, BQ)
    tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles % (num_blocks * num_splits)
    program = tl.program_id(0) // num_tiles // (num_blocks * num_splits)
    local, head, column, is_instance, is_real = slot_heads(program, num_instances, num_groups, P, HEADS)
    number = part // num_splits
    in_block = tile * BQ + tl.arange(0, BQ)
    query = in_block + number * block
    is_query = (in_block < block) & (query < num_queries)
    plane = (local * H + head) * plane_blocks + number
    rows = (plane * block)[None, :] * num_keys + (in_block * num_keys)[:, None]
    key0 = first_key + number * block
    first = query0 + number * block + tile * BQ + S - T
    low, high = key_bounds(first, first + BQ - 1, num_keys, S, key0, window, IS_CAUSAL, HAS_WINDOW, BK)
    return local, head, column, is_instance, is_real, query, is_query, rows, key0, low, high, part % num_splits


@triton.jit
def _key_tile(
    key_mask, image, is_instance, position, token, S, window, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Prepare a tile of keys.

    Returns:
        mask: Which keys and slots there are [keys, 16].
        bias: -inf where a key is hidden from a query [queries, keys, 1].
        seen: Which keys a mask lets the slots' images see [1, keys, 1 or 16].
    """
    mask = ((token >= 0) & (token < S))[:, None] & is_instance[None, :]
    bias = hidden_bias(position[:, None], token[None, :], S, window, IS_CAUSAL, HAS_WINDOW)[:, :, None]
    seen = mask
    if HAS_MASK:
        seen = mask_of_keys(key_mask, image, token, S, is_instance, P)
    return mask, bias, seen[None, :, :]


@triton.jit(do_not_specialize=SIZES)
def row_statistics(
    x, log_sums, pre_q, pre_k, pre_base, key_mask,
    num_instances, num_groups, H, image0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    num_keys, window, num_splits,
    P: tl.constexpr, HEADS: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr,
    PRE_KG: tl.constexpr, PRE_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, DOT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """F1: the base-2 logarithm of the sum of exp(composed scores), per query and head, of each split of the keys."""
    PRE: tl.constexpr = PRE_QR + PRE_QG + PRE_B > 0
    local, head, column, is_instance, is_real, query, is_query, rows, key0, low, high, split = _query_tile(
        num_instances, num_groups, H, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key, num_keys,
        window, num_splits, P, HEADS, IS_CAUSAL, HAS_WINDOW, BQ, BK,
    )  # fmt: skip
    image, width = local + image0, num_groups * P
    mask, weight_mask = is_query[:, None] & is_real[None, :], is_query[:, None] & is_instance[None, :]
    pre_rows = load_weights(pre_q, image, T, column, width, query0 + query, weight_mask, 2 * PRE_QR + PRE_QG)
    pre = batch_matrices(pre_rows, pre_base, head, is_real, BQ, P, HEADS, PRE_QR, PRE_QG, PRE_B, DOT)
    sums = group_sum(BQ, P, DOT)
    largest = tl.full([BQ, LANES, SLOTS], -EMPTY, tl.float32)
    total = tl.zeros([BQ, LANES, SLOTS], tl.float32)
    position = query0 + query + S - T
    low, high = split_range(low, high, split, num_splits, BK)
    for start in range(low, high, BK):
        key = tl.multiple_of(start, BK) + tl.arange(0, BK)
        real, bias, seen = _key_tile(
            key_mask, image, is_instance, position, key0 + key, S, window, IS_CAUSAL, HAS_WINDOW, HAS_MASK, P
        )
        inside = mask[:, None, :] & (key < num_keys)[None, :, None]
        x16 = tl.load(x + rows[:, None, :] + key[None, :, None], mask=inside, other=0.0).to(DOT)
        pre_keys = load_weights(pre_k, image, S, column, width, key0 + key, real, 2 * PRE_KR + PRE_KG)
        y = mix(x16.to(tl.float32), x16, pre, pre_keys, sums, PRE, PRE_KR, PRE_KG, 0, PRE_KR)
        y = within_threads(exponents(y, bias, seen, HAS_MASK))
        new_largest = tl.maximum(largest, tl.max(y, 1))
        total = total * tl.exp2(largest - new_largest) + tl.sum(tl.exp2(y - new_largest[:, None, :, :]), 1)
        largest = new_largest
    top = tl.max(largest, 1)
    total = tl.sum(total * tl.exp2(largest - top[:, None, :]), 1)
    nothing = tl.where(num_splits == 1, EMPTY, -EMPTY)  # so that parts can be added first
    result = tl.where(total > 0, top + tl.log2(tl.where(total > 0, total, 1.0)), nothing)
    place = (split * (num_instances // num_groups) + local) * H + head
    tl.store(log_sums + (place * num_queries)[None, :] + query[:, None], result, mask=mask)


@triton.jit(do_not_specialize=SIZES)
def composed_weights(
    x, log_sum, pre_q, pre_k, pre_base, post_q, post_k, post_base, key_mask,
    num_instances, num_groups, H, image0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    num_keys, window, num_splits,
    P: tl.constexpr, HEADS: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr,
    PRE_KG: tl.constexpr, PRE_B: tl.constexpr, POST_QR: tl.constexpr, POST_QG: tl.constexpr, POST_KR: tl.constexpr,
    POST_KG: tl.constexpr, POST_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, DOT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """F2: scores to composed weights, in place."""
    PRE: tl.constexpr = PRE_QR + PRE_QG + PRE_B > 0
    POST: tl.constexpr = POST_QR + POST_QG + POST_B > 0
    local, head, column, is_instance, is_real, query, is_query, rows, key0, low, high, split = _query_tile(
        num_instances, num_groups, H, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key, num_keys,
        window, num_splits, P, HEADS, IS_CAUSAL, HAS_WINDOW, BQ, BK,
    )  # fmt: skip
    image, width = local + image0, num_groups * P
    mask, weight_mask = is_query[:, None] & is_real[None, :], is_query[:, None] & is_instance[None, :]
    pre_rows = load_weights(pre_q, image, T, column, width, query0 + query, weight_mask, 2 * PRE_QR + PRE_QG)
    pre = batch_matrices(pre_rows, pre_base, head, is_real, BQ, P, HEADS, PRE_QR, PRE_QG, PRE_B, DOT)
    post_rows = load_weights(post_q, image, T, column, width, query0 + query, weight_mask, 2 * POST_QR + POST_QG)
    post = batch_matrices(post_rows, post_base, head, is_real, BQ, P, HEADS, POST_QR, POST_QG, POST_B, DOT)
    sums = group_sum(BQ, P, DOT)
    statistics = ((image.to(tl.int64) * H + head) * T)[None, :] + (query0 + query)[:, None]
    log_sum_tile = tl.load(log_sum + statistics, mask=mask, other=EMPTY)[:, None, :]
    position = query0 + query + S - T
    start0, stop = split_range(low, high, split, num_splits, BK)
    for start in range(start0, stop, BK):
        key = tl.multiple_of(start, BK) + tl.arange(0, BK)
        real, bias, seen = _key_tile(
            key_mask, image, is_instance, position, key0 + key, S, window, IS_CAUSAL, HAS_WINDOW, HAS_MASK, P
        )
        inside = mask[:, None, :] & (key < num_keys)[None, :, None]
        place = x + rows[:, None, :] + key[None, :, None]
        x16 = tl.load(place, mask=inside, other=0.0).to(DOT)
        pre_keys = load_weights(pre_k, image, S, column, width, key0 + key, real, 2 * PRE_KR + PRE_KG)
        post_keys = load_weights(post_k, image, S, column, width, key0 + key, real, 2 * POST_KR + POST_KG)
        y = mix(x16.to(tl.float32), x16, pre, pre_keys, sums, PRE, PRE_KR, PRE_KG, 0, PRE_KR)
        weights = tl.exp2(exponents(y, bias, seen, HAS_MASK) - log_sum_tile)
        composed = mix(weights, weights.to(DOT), post, post_keys, sums, POST, POST_KR, POST_KG, 0, POST_KR)
        tl.store(place, composed.to(x.dtype.element_ty), mask=inside)
    if split == 0:
        store_zeros(x + rows, 0, low, num_keys, mask, BK)
        store_zeros(x + rows, (high + BK - 1) // BK * BK, num_keys, num_keys, mask, BK)


@triton.jit
def _store_base_sum(d_matrices, sums):
    """Store a program's share of a base's gradient, [16, 16]; the launch adds them up."""
    slots = tl.arange(0, SLOTS)
    square = slots[:, None] * SLOTS + slots[None, :]
    tl.store(sums + tl.program_id(0).to(tl.int64) * SLOTS * SLOTS + square, tl.sum(d_matrices, 0))


@triton.jit(do_not_specialize=SIZES)
def post_gradients(
    x, da, log_sum, row_sums, pre_q, pre_k, pre_base, post_q, post_k, post_base, d_post_q, d_post_base, key_mask,
    num_instances, num_groups, H, image0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    num_keys, window, num_splits,
    P: tl.constexpr, HEADS: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr,
    PRE_KG: tl.constexpr, PRE_B: tl.constexpr, POST_QR: tl.constexpr, POST_QG: tl.constexpr, POST_KR: tl.constexpr,
    POST_KG: tl.constexpr, POST_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, DOT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """R1: sum_j P dP, and the gradients of the post-composition's query side and base, of each split of the keys."""
    PRE: tl.constexpr = PRE_QR + PRE_QG + PRE_B > 0
    POST: tl.constexpr = POST_QR + POST_QG + POST_B > 0
    local, head, column, is_instance, is_real, query, is_query, rows, key0, low, high, split = _query_tile(
        num_instances, num_groups, H, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key, num_keys,
        window, num_splits, P, HEADS, IS_CAUSAL, HAS_WINDOW, BQ, BK,
    )  # fmt: skip
    image, width = local + image0, num_groups * P
    mask, weight_mask = is_query[:, None] & is_real[None, :], is_query[:, None] & is_instance[None, :]
    pre_rows = load_weights(pre_q, image, T, column, width, query0 + query, weight_mask, 2 * PRE_QR + PRE_QG)
    pre = batch_matrices(pre_rows, pre_base, head, is_real, BQ, P, HEADS, PRE_QR, PRE_QG, PRE_B, DOT)
    post_rows = load_weights(post_q, image, T, column, width, query0 + query, weight_mask, 2 * POST_QR + POST_QG)
    post = batch_matrices(post_rows, post_base, head, is_real, BQ, P, HEADS, POST_QR, POST_QG, POST_B, DOT)
    post = tl.permute(post, (0, 2, 1))
    sums = group_sum(BQ, P, DOT)
    statistics = ((image.to(tl.int64) * H + head) * T)[None, :] + (query0 + query)[:, None]
    log_sum_tile = tl.load(log_sum + statistics, mask=mask, other=EMPTY)[:, None, :]
    row_sum = tl.zeros([BQ, LANES, SLOTS], tl.float32)
    d_post = tl.zeros([BQ, SLOTS, SLOTS], tl.float32)
    position = query0 + query + S - T
    low, high = split_range(low, high, split, num_splits, BK)
    for start in range(low, high, BK):
        key = tl.multiple_of(start, BK) + tl.arange(0, BK)
        real, bias, seen = _key_tile(
            key_mask, image, is_instance, position, key0 + key, S, window, IS_CAUSAL, HAS_WINDOW, HAS_MASK, P
        )
        inside = mask[:, None, :] & (key < num_keys)[None, :, None]
        place = rows[:, None, :] + key[None, :, None]
        x16 = tl.load(x + place, mask=inside, other=0.0).to(DOT)
        da16 = tl.load(da + place, mask=inside, other=0.0).to(DOT)
        pre_keys = load_weights(pre_k, image, S, column, width, key0 + key, real, 2 * PRE_KR + PRE_KG)
        post_keys = load_weights(post_k, image, S, column, width, key0 + key, real, 2 * POST_KR + POST_KG)
        y = mix(x16.to(tl.float32), x16, pre, pre_keys, sums, PRE, PRE_KR, PRE_KG, 0, PRE_KR)
        weights = tl.exp2(exponents(y, bias, seen, HAS_MASK) - log_sum_tile)
        d_weights = mix(da16.to(tl.float32), da16, post, post_keys, sums, POST, POST_KR, POST_KG, POST_KR, 0)
        row_sum += tl.sum(within_threads(weights * d_weights), 1)
        if POST:
            d_post = outer_sum(weights.to(DOT), da16, d_post)
    local_images = num_instances // num_groups
    place = (split * local_images + local) * H + head
    tl.store(row_sums + (place * num_queries)[None, :] + query[:, None], tl.sum(row_sum, 1), mask=mask)
    if POST_QR + POST_QG > 0:
        token = ((split * local_images + local) * num_queries)[None, :] + query[:, None]
        pointers = d_post_q + token.to(tl.int64) * (2 * POST_QR + POST_QG) * width + column[None, :]
        store_weight_gradients(d_post, post_rows, pointers, width, weight_mask, P, POST_QR, POST_QG)
    if POST_B:
        _store_base_sum(d_post, d_post_base)


@triton.jit(do_not_specialize=SIZES)
def pre_gradients(
    x, da, log_sum, row_sum, pre_q, pre_k, pre_base, post_q, post_k, post_base, d_pre_q, d_pre_base, key_mask,
    num_instances, num_groups, H, image0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    num_keys, window, num_splits,
    P: tl.constexpr, HEADS: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr,
    PRE_KG: tl.constexpr, PRE_B: tl.constexpr, POST_QR: tl.constexpr, POST_QG: tl.constexpr, POST_KR: tl.constexpr,
    POST_KG: tl.constexpr, POST_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, DOT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """R2: gradients of the pre-composition's query side and base, of each split of the keys; x -> A, da -> dX."""
    PRE: tl.constexpr = PRE_QR + PRE_QG + PRE_B > 0
    POST: tl.constexpr = POST_QR + POST_QG + POST_B > 0
    local, head, column, is_instance, is_real, query, is_query, rows, key0, low, high, split = _query_tile(
        num_instances, num_groups, H, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key, num_keys,
        window, num_splits, P, HEADS, IS_CAUSAL, HAS_WINDOW, BQ, BK,
    )  # fmt: skip
    image, width = local + image0, num_groups * P
    mask, weight_mask = is_query[:, None] & is_real[None, :], is_query[:, None] & is_instance[None, :]
    pre_rows = load_weights(pre_q, image, T, column, width, query0 + query, weight_mask, 2 * PRE_QR + PRE_QG)
    pre = batch_matrices(pre_rows, pre_base, head, is_real, BQ, P, HEADS, PRE_QR, PRE_QG, PRE_B, DOT)
    post_rows = load_weights(post_q, image, T, column, width, query0 + query, weight_mask, 2 * POST_QR + POST_QG)
    post = batch_matrices(post_rows, post_base, head, is_real, BQ, P, HEADS, POST_QR, POST_QG, POST_B, DOT)
    pre_back, post_back = tl.permute(pre, (0, 2, 1)), tl.permute(post, (0, 2, 1))
    sums = group_sum(BQ, P, DOT)
    statistics = ((image.to(tl.int64) * H + head) * T)[None, :] + (query0 + query)[:, None]
    log_sum_tile = tl.load(log_sum + statistics, mask=mask, other=EMPTY)[:, None, :]
    row_sum_tile = tl.load(row_sum + statistics, mask=mask, other=0.0)[:, None, :]
    d_pre = tl.zeros([BQ, SLOTS, SLOTS], tl.float32)
    position = query0 + query + S - T
    start0, stop = split_range(low, high, split, num_splits, BK)
    for start in range(start0, stop, BK):
        key = tl.multiple_of(start, BK) + tl.arange(0, BK)
        real, bias, seen = _key_tile(
            key_mask, image, is_instance, position, key0 + key, S, window, IS_CAUSAL, HAS_WINDOW, HAS_MASK, P
        )
        inside = mask[:, None, :] & (key < num_keys)[None, :, None]
        place = rows[:, None, :] + key[None, :, None]
        x16 = tl.load(x + place, mask=inside, other=0.0).to(DOT)
        da16 = tl.load(da + place, mask=inside, other=0.0).to(DOT)
        pre_keys = load_weights(pre_k, image, S, column, width, key0 + key, real, 2 * PRE_KR + PRE_KG)
        post_keys = load_weights(post_k, image, S, column, width, key0 + key, real, 2 * POST_KR + POST_KG)
        y = mix(x16.to(tl.float32), x16, pre, pre_keys, sums, PRE, PRE_KR, PRE_KG, 0, PRE_KR)
        weights = tl.exp2(exponents(y, bias, seen, HAS_MASK) - log_sum_tile)
        composed = mix(weights, weights.to(DOT), post, post_keys, sums, POST, POST_KR, POST_KG, 0, POST_KR)
        tl.store(x + place, composed.to(x.dtype.element_ty), mask=inside)
        d_weights = mix(da16.to(tl.float32), da16, post_back, post_keys, sums, POST, POST_KR, POST_KG, POST_KR, 0)
        dy = weights * (d_weights - row_sum_tile)
        dy16 = dy.to(DOT)
        if PRE:
            d_pre = outer_sum(x16, dy16, d_pre)
        dx = mix(dy, dy16, pre_back, pre_keys, sums, PRE, PRE_KR, PRE_KG, PRE_KR, 0)
        tl.store(da + place, dx.to(da.dtype.element_ty), mask=inside)
    if split == 0:
        for workspace in tl.static_range(2):
            pointers = (x if workspace == 0 else da) + rows
            store_zeros(pointers, 0, low, num_keys, mask, BK)
            store_zeros(pointers, (high + BK - 1) // BK * BK, num_keys, num_keys, mask, BK)
    if PRE_QR + PRE_QG > 0:
        token = ((split * (num_instances // num_groups) + local) * num_queries)[None, :] + query[:, None]
        pointers = d_pre_q + token.to(tl.int64) * (2 * PRE_QR + PRE_QG) * width + column[None, :]
        store_weight_gradients(d_pre, pre_rows, pointers, width, weight_mask, P, PRE_QR, PRE_QG)
    if PRE_B:
        _store_base_sum(d_pre, d_pre_base)


@triton.jit(do_not_specialize=SIZES)
def key_gradients(
    x, da, log_sum, row_sum, pre_q, pre_k, pre_base, post_q, post_k, post_base, d_pre_k, d_post_k, key_mask,
    num_instances, num_groups, H, image0, T, S, query0, num_queries, block, num_blocks, plane_blocks, first_key,
    num_keys, window, num_splits,
    P: tl.constexpr, HEADS: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr,
    PRE_KG: tl.constexpr, PRE_B: tl.constexpr, POST_QR: tl.constexpr, POST_QG: tl.constexpr, POST_KR: tl.constexpr,
    POST_KG: tl.constexpr, POST_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_MASK: tl.constexpr, DOT: tl.constexpr, BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """K: gradients of the key side of both compositions, of each block and each split of its queries.

    Keys are the batch side, queries the row side.
    """
    PRE: tl.constexpr = PRE_KR + PRE_KG + PRE_B > 0
    POST: tl.constexpr = POST_KR + POST_KG + POST_B > 0
    num_tiles = tl.cdiv(num_keys, BK)
    tile = tl.program_id(0) % num_tiles
    part = tl.program_id(0) // num_tiles % (num_blocks * num_splits)
    program = tl.program_id(0) // num_tiles // (num_blocks * num_splits)
    number, split = part // num_splits, part % num_splits
    local, head, column, is_instance, is_real = slot_heads(program, num_instances, num_groups, P, HEADS)
    image, width = local + image0, num_groups * P
    key = tile * BK + tl.arange(0, BK)
    key0 = first_key + number * block
    token = key0 + key
    mask = ((key < num_keys) & (token >= 0) & (token < S))[:, None] & is_instance[None, :]
    plane = (local * H + head) * plane_blocks + number
    columns = (plane * block)[None, :] * num_keys + key[:, None]
    pre_rows = load_weights(pre_k, image, S, column, width, token, mask, 2 * PRE_KR + PRE_KG)
    pre = batch_matrices(pre_rows, pre_base, head, is_real, BK, P, HEADS, PRE_KR, PRE_KG, PRE_B, DOT)
    post_rows = load_weights(post_k, image, S, column, width, token, mask, 2 * POST_KR + POST_KG)
    post = batch_matrices(post_rows, post_base, head, is_real, BK, P, HEADS, POST_KR, POST_KG, POST_B, DOT)
    post_back = tl.permute(post, (0, 2, 1))
    sums = group_sum(BK, P, DOT)
    d_pre = tl.zeros([BK, SLOTS, SLOTS], tl.float32)
    d_post = tl.zeros([BK, SLOTS, SLOTS], tl.float32)
    position0 = query0 + number * block + S - T
    first = key0 + tile * BK
    num_real = tl.minimum(block, num_queries - number * block)
    low, high = query_bounds(first, first + BK - 1, num_real, position0, window, IS_CAUSAL, HAS_WINDOW, BQ)
    low, high = split_range(low, high, split, num_splits, BQ)
    for start in range(low, high, BQ):
        in_block = tl.multiple_of(start, BQ) + tl.arange(0, BQ)
        query = query0 + number * block + in_block
        real = (in_block < num_real)[:, None] & is_real[None, :]
        weight_mask = (in_block < num_real)[:, None] & is_instance[None, :]
        bias = hidden_bias((position0 + in_block)[None, :], token[:, None], S, window, IS_CAUSAL, HAS_WINDOW)[
            :, :, None
        ]
        seen = mask
        if HAS_MASK:
            seen = mask_of_keys(key_mask, image, token, S, is_instance, P)
        inside = ((key < num_keys)[:, None] & is_real[None, :])[:, None, :] & (in_block < num_real)[None, :, None]
        place = columns[:, None, :] + (in_block * num_keys)[None, :, None]
        x16 = tl.load(x + place, mask=inside, other=0.0).to(DOT)
        da16 = tl.load(da + place, mask=inside, other=0.0).to(DOT)
        pre_queries = load_weights(pre_q, image, T, column, width, query, weight_mask, 2 * PRE_QR + PRE_QG)
        post_queries = load_weights(post_q, image, T, column, width, query, weight_mask, 2 * POST_QR + POST_QG)
        statistics = ((image.to(tl.int64) * H + head) * T)[None, :] + query[:, None]
        log_sum_tile = tl.load(log_sum + statistics, mask=real, other=EMPTY)[None, :, :]
        row_sum_tile = tl.load(row_sum + statistics, mask=real, other=0.0)[None, :, :]
        y = mix(x16.to(tl.float32), x16, pre, pre_queries, sums, PRE, PRE_QR, PRE_QG, 0, PRE_QR)
        weights = tl.exp2(exponents(y, bias, seen[:, None, :], HAS_MASK) - log_sum_tile)
        if POST_KR + POST_KG > 0:
            d_post = outer_sum(weights.to(DOT), da16, d_post)
        if PRE_KR + PRE_KG > 0:
            d_weights = mix(
                da16.to(tl.float32), da16, post_back, post_queries, sums, POST, POST_QR, POST_QG, POST_QR, 0
            )
            dy = weights * (d_weights - row_sum_tile)
            d_pre = outer_sum(x16, dy.to(DOT), d_pre)
    place = split * (num_instances // num_groups) + local
    place = ((place * num_blocks + number) * num_keys)[None, :] + key[:, None]
    stored = (key < num_keys)[:, None] & is_instance[None, :]
    if PRE_KR + PRE_KG > 0:
        pointers = d_pre_k + place.to(tl.int64) * (2 * PRE_KR + PRE_KG) * width + column[None, :]
        store_weight_gradients(d_pre, pre_rows, pointers, width, stored, P, PRE_KR, PRE_KG)
    if POST_KR + POST_KG > 0:
        pointers = d_post_k + place.to(tl.int64) * (2 * POST_KR + POST_KG) * width + column[None, :]
        store_weight_gradients(d_post, post_rows, pointers, width, stored, P, POST_KR, POST_KG)
