"""The five kernels that mix heads on a chunk of scores: two forward, three backward.

The workspace `x` [images, H, C, stride] holds the scaled scores of a chunk of C queries and num_keys keys, `da` the
gradient of the composed weights; library products make and use them. `log_sum` [B, H, T] is in base 2, `row_sum` is
sum_j P dP. Chunks are worked through in order, so that the key side's gradients are summed without atomics.

    row_statistics      x -> log_sum
    composed_weights    x -> A, in place
    post_gradients      x, da -> row_sum, gradients of the query side of the post-composition
    key_gradients       x, da -> gradients of the key side of both compositions, added
    pre_gradients       x, da -> gradients of the query side of the pre-composition; x -> A, da -> dX, in place
"""

# B batch, T query tokens, S key tokens, H heads, P slots of a group

import triton
import triton.language as tl

from .tiles import (
    SLOTS,
    batch_matrices,
    dot,
    key_bounds,
    load_base,
    query_bounds,
    row_mix,
    slot_heads,
    store_weight_gradients,
    store_zeros,
    visible,
)

LOG2E = tl.constexpr(1.4426950408889634)
EMPTY = tl.constexpr(1e30)  # the log-sum of a query with no visible key: its weights become 0


@triton.jit
def _matrices(
    w, base, image, head, is_real, tokens, num_tokens, H, group_heads, P: tl.constexpr, RANK: tl.constexpr,
    GATE: tl.constexpr, BASE: tl.constexpr,
):  # fmt: skip
    """Build the batch side's matrices of one composition, the static base included: [tokens, 16, 16]."""
    ROWS: tl.constexpr = 2 * RANK + GATE
    matrices = tl.zeros([tokens.shape[0], SLOTS, SLOTS], tl.float32)
    if ROWS > 0:
        mask = (tokens < num_tokens)[:, None] & is_real[None, :]
        offsets = image.to(tl.int64) * num_tokens * ROWS * H + head
        matrices += batch_matrices(w, offsets, tokens, H, mask, P, RANK, GATE)
    if BASE:
        matrices += load_base(base, head, group_heads, is_real, P)[None, :, :]
    return matrices


@triton.jit
def _mix(
    x, matrices, w, image, head, is_real, tokens, num_tokens, H, P: tl.constexpr, BATCH: tl.constexpr,
    RANK: tl.constexpr, GATE: tl.constexpr, TRANSPOSED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Compose a tile [N, M, 16]: by the batch side's matrices [N, 16, 16] and the weights of the row side's tokens."""
    y = x
    if BATCH:
        if TRANSPOSED:
            y = dot(x, tl.permute(matrices, (0, 2, 1)), y, DOT)
        else:
            y = dot(x, matrices, y, DOT)
    ROWS: tl.constexpr = 2 * RANK + GATE
    if ROWS > 0:
        mask = (tokens < num_tokens)[:, None] & is_real[None, :]
        offsets = image.to(tl.int64) * num_tokens * ROWS * H + head
        y = row_mix(x, y, w, offsets, tokens, H, mask, P, RANK, GATE, TRANSPOSED, DOT)
    return y


@triton.jit
def _seen(
    query, key, key_mask, image, is_real, num_queries, num_keys, S, first_key, offset, window,
    IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr,
):  # fmt: skip
    """Tell which elements [queries, keys, 16] are visible."""
    seen = visible(query, key, num_queries, num_keys, first_key, offset, IS_CAUSAL, window)[:, :, None]
    seen = seen & is_real[None, None, :]
    if HAS_MASK:
        inside = (key < num_keys)[:, None] & is_real[None, :]
        open_ = tl.load(key_mask + image[None, :] * S + (key + first_key)[:, None], mask=inside, other=0) != 0
        seen = seen & open_[None, :, :]
    return seen


@triton.jit
def row_statistics(
    x, log_sum, pre_q, pre_k, pre_base, key_mask,
    num_instances, num_groups, group_heads, H, image0, T, S, query0, num_queries, first_key, num_keys, stride, window,
    P: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr, PRE_KG: tl.constexpr,
    PRE_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DOT: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """F1: the base-2 logarithm of the sum of exp(composed scores), per query and head."""
    local, head, is_real = slot_heads(tl.program_id(1), num_instances, num_groups, group_heads, P)
    image = local + image0
    query = tl.program_id(0) * BQ + tl.arange(0, BQ)
    rows = x + (local * H + head)[None, :] * (num_queries * stride) + query[:, None] * stride
    in_chunk = (query < num_queries)[:, None] & is_real[None, :]
    matrices = _matrices(
        pre_q, pre_base, image, head, is_real, query + query0, T, H, group_heads, P, PRE_QR, PRE_QG, PRE_B
    )
    largest = tl.full([BQ, SLOTS], -EMPTY, tl.float32)
    total = tl.zeros([BQ, SLOTS], tl.float32)
    offset = query0 + S - T
    first = tl.program_id(0) * BQ
    low, high = key_bounds(
        first, tl.minimum(first + BQ, num_queries) - 1, num_keys, first_key, offset, window, IS_CAUSAL, BK
    )
    for start in range(low, high, BK):
        key = start + tl.arange(0, BK)
        inside = in_chunk[:, None, :] & (key < num_keys)[None, :, None]
        scores = tl.load(rows[:, None, :] + key[None, :, None], mask=inside, other=0.0).to(tl.float32)
        y = _mix(
            scores, matrices, pre_k, image, head, is_real, key + first_key, S, H, P,
            PRE_QR + PRE_QG + PRE_B > 0, PRE_KR, PRE_KG, False, DOT,
        )  # fmt: skip
        seen = _seen(
            query, key, key_mask, image, is_real, num_queries, num_keys, S, first_key, offset, window,
            IS_CAUSAL, HAS_MASK,
        )  # fmt: skip
        y = tl.where(seen, y * LOG2E, -EMPTY)
        new_largest = tl.maximum(largest, tl.max(y, 1))
        exponentials = tl.where(seen, tl.exp2(y - new_largest[:, None, :]), 0.0)
        total = total * tl.exp2(largest - new_largest) + tl.sum(exponentials, 1)
        largest = new_largest
    result = tl.where(total > 0, largest + tl.log2(tl.where(total > 0, total, 1.0)), EMPTY)
    pointers = log_sum + ((image.to(tl.int64) * H + head) * T)[None, :] + (query + query0)[:, None]
    tl.store(pointers, result, mask=in_chunk)


@triton.jit
def _weights(y, seen, log_sum_tile):
    """exp(composed scores) over their sum, for a tile; 0 where nothing is visible."""
    return tl.where(seen, tl.exp2(tl.where(seen, y * LOG2E, 0.0) - log_sum_tile), 0.0)


@triton.jit
def composed_weights(
    x, log_sum, pre_q, pre_k, pre_base, post_q, post_k, post_base, key_mask,
    num_instances, num_groups, group_heads, H, image0, T, S, query0, num_queries, first_key, num_keys, stride, window,
    P: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr, PRE_KG: tl.constexpr,
    PRE_B: tl.constexpr, POST_QR: tl.constexpr, POST_QG: tl.constexpr, POST_KR: tl.constexpr, POST_KG: tl.constexpr,
    POST_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DOT: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """F2: scores to composed weights, in place."""
    local, head, is_real = slot_heads(tl.program_id(1), num_instances, num_groups, group_heads, P)
    image = local + image0
    query = tl.program_id(0) * BQ + tl.arange(0, BQ)
    rows = x + (local * H + head)[None, :] * (num_queries * stride) + query[:, None] * stride
    in_chunk = (query < num_queries)[:, None] & is_real[None, :]
    pre = _matrices(pre_q, pre_base, image, head, is_real, query + query0, T, H, group_heads, P, PRE_QR, PRE_QG, PRE_B)
    post = _matrices(
        post_q, post_base, image, head, is_real, query + query0, T, H, group_heads, P, POST_QR, POST_QG, POST_B
    )
    pointers = log_sum + ((image.to(tl.int64) * H + head) * T)[None, :] + (query + query0)[:, None]
    log_sum_tile = tl.load(pointers, mask=in_chunk, other=EMPTY)[:, None, :]
    offset = query0 + S - T
    first = tl.program_id(0) * BQ
    low, high = key_bounds(
        first, tl.minimum(first + BQ, num_queries) - 1, num_keys, first_key, offset, window, IS_CAUSAL, BK
    )
    for start in range(low, high, BK):
        key = start + tl.arange(0, BK)
        inside = in_chunk[:, None, :] & (key < num_keys)[None, :, None]
        scores = tl.load(rows[:, None, :] + key[None, :, None], mask=inside, other=0.0).to(tl.float32)
        y = _mix(
            scores, pre, pre_k, image, head, is_real, key + first_key, S, H, P,
            PRE_QR + PRE_QG + PRE_B > 0, PRE_KR, PRE_KG, False, DOT,
        )  # fmt: skip
        seen = _seen(
            query, key, key_mask, image, is_real, num_queries, num_keys, S, first_key, offset, window,
            IS_CAUSAL, HAS_MASK,
        )  # fmt: skip
        weights = _mix(
            _weights(y, seen, log_sum_tile), post, post_k, image, head, is_real, key + first_key, S, H, P,
            POST_QR + POST_QG + POST_B > 0, POST_KR, POST_KG, False, DOT,
        )  # fmt: skip
        tl.store(rows[:, None, :] + key[None, :, None], weights.to(x.dtype.element_ty), mask=inside)
    store_zeros(rows, 0, low, num_keys, in_chunk, BK)
    store_zeros(rows, (high + BK - 1) // BK * BK, num_keys, num_keys, in_chunk, BK)


@triton.jit
def _store_base_sum(d_matrices, sums):
    """Store a program's share of a base's gradient, [16, 16]; the launch adds them up."""
    slots = tl.arange(0, SLOTS)
    program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    square = slots[:, None] * SLOTS + slots[None, :]
    tl.store(sums + program.to(tl.int64) * SLOTS * SLOTS + square, tl.sum(d_matrices, 0))


@triton.jit
def post_gradients(
    x, da, log_sum, row_sum, pre_q, pre_k, pre_base, post_q, post_k, post_base, d_post_q, d_post_base, key_mask,
    num_instances, num_groups, group_heads, H, image0, T, S, query0, num_queries, first_key, num_keys, stride, window,
    P: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr, PRE_KG: tl.constexpr,
    PRE_B: tl.constexpr, POST_QR: tl.constexpr, POST_QG: tl.constexpr, POST_KR: tl.constexpr, POST_KG: tl.constexpr,
    POST_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DOT: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """R1: sum_j P dP, and the gradients of the post-composition's query side and base."""
    local, head, is_real = slot_heads(tl.program_id(1), num_instances, num_groups, group_heads, P)
    image = local + image0
    query = tl.program_id(0) * BQ + tl.arange(0, BQ)
    row = (local * H + head)[None, :] * (num_queries * stride) + query[:, None] * stride
    in_chunk = (query < num_queries)[:, None] & is_real[None, :]
    pre = _matrices(pre_q, pre_base, image, head, is_real, query + query0, T, H, group_heads, P, PRE_QR, PRE_QG, PRE_B)
    post = _matrices(
        post_q, post_base, image, head, is_real, query + query0, T, H, group_heads, P, POST_QR, POST_QG, POST_B
    )
    statistics = ((image.to(tl.int64) * H + head) * T)[None, :] + (query + query0)[:, None]
    log_sum_tile = tl.load(log_sum + statistics, mask=in_chunk, other=EMPTY)[:, None, :]
    sums = tl.zeros([BQ, SLOTS], tl.float32)
    d_matrices = tl.zeros([BQ, SLOTS, SLOTS], tl.float32)
    offset = query0 + S - T
    first = tl.program_id(0) * BQ
    low, high = key_bounds(
        first, tl.minimum(first + BQ, num_queries) - 1, num_keys, first_key, offset, window, IS_CAUSAL, BK
    )
    for start in range(low, high, BK):
        key = start + tl.arange(0, BK)
        inside = in_chunk[:, None, :] & (key < num_keys)[None, :, None]
        place = row[:, None, :] + key[None, :, None]
        scores = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        y = _mix(
            scores, pre, pre_k, image, head, is_real, key + first_key, S, H, P,
            PRE_QR + PRE_QG + PRE_B > 0, PRE_KR, PRE_KG, False, DOT,
        )  # fmt: skip
        seen = _seen(
            query, key, key_mask, image, is_real, num_queries, num_keys, S, first_key, offset, window,
            IS_CAUSAL, HAS_MASK,
        )  # fmt: skip
        weights = _weights(y, seen, log_sum_tile)
        d_composed = tl.load(da + place, mask=inside, other=0.0).to(tl.float32)
        d_weights = _mix(
            d_composed, post, post_k, image, head, is_real, key + first_key, S, H, P,
            POST_QR + POST_QG + POST_B > 0, POST_KR, POST_KG, True, DOT,
        )  # fmt: skip
        sums += tl.sum(weights * d_weights, 1)
        if POST_QR + POST_QG + POST_B > 0:
            d_matrices = dot(tl.permute(weights, (0, 2, 1)), d_composed, d_matrices, DOT)
    tl.store(row_sum + statistics, sums, mask=in_chunk)
    if POST_QR + POST_QG > 0:
        offsets = image.to(tl.int64) * T * (2 * POST_QR + POST_QG) * H + head
        store_weight_gradients(
            d_matrices, post_q, d_post_q, offsets, query + query0, H, in_chunk, False, P, POST_QR, POST_QG
        )
    if POST_B:
        _store_base_sum(d_matrices, d_post_base)


@triton.jit
def pre_gradients(
    x, da, log_sum, row_sum, pre_q, pre_k, pre_base, post_q, post_k, post_base, d_pre_q, d_pre_base, key_mask,
    num_instances, num_groups, group_heads, H, image0, T, S, query0, num_queries, first_key, num_keys, stride, window,
    P: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr, PRE_KG: tl.constexpr,
    PRE_B: tl.constexpr, POST_QR: tl.constexpr, POST_QG: tl.constexpr, POST_KR: tl.constexpr, POST_KG: tl.constexpr,
    POST_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DOT: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """R2: the gradients of the pre-composition's query side and base; scores to A and da to dX, in place."""
    local, head, is_real = slot_heads(tl.program_id(1), num_instances, num_groups, group_heads, P)
    image = local + image0
    query = tl.program_id(0) * BQ + tl.arange(0, BQ)
    row = (local * H + head)[None, :] * (num_queries * stride) + query[:, None] * stride
    in_chunk = (query < num_queries)[:, None] & is_real[None, :]
    pre = _matrices(pre_q, pre_base, image, head, is_real, query + query0, T, H, group_heads, P, PRE_QR, PRE_QG, PRE_B)
    post = _matrices(
        post_q, post_base, image, head, is_real, query + query0, T, H, group_heads, P, POST_QR, POST_QG, POST_B
    )
    statistics = ((image.to(tl.int64) * H + head) * T)[None, :] + (query + query0)[:, None]
    log_sum_tile = tl.load(log_sum + statistics, mask=in_chunk, other=EMPTY)[:, None, :]
    row_sum_tile = tl.load(row_sum + statistics, mask=in_chunk, other=0.0)[:, None, :]
    d_matrices = tl.zeros([BQ, SLOTS, SLOTS], tl.float32)
    offset = query0 + S - T
    first = tl.program_id(0) * BQ
    low, high = key_bounds(
        first, tl.minimum(first + BQ, num_queries) - 1, num_keys, first_key, offset, window, IS_CAUSAL, BK
    )
    for start in range(low, high, BK):
        key = start + tl.arange(0, BK)
        inside = in_chunk[:, None, :] & (key < num_keys)[None, :, None]
        place = row[:, None, :] + key[None, :, None]
        scores = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        y = _mix(
            scores, pre, pre_k, image, head, is_real, key + first_key, S, H, P,
            PRE_QR + PRE_QG + PRE_B > 0, PRE_KR, PRE_KG, False, DOT,
        )  # fmt: skip
        seen = _seen(
            query, key, key_mask, image, is_real, num_queries, num_keys, S, first_key, offset, window,
            IS_CAUSAL, HAS_MASK,
        )  # fmt: skip
        weights = _weights(y, seen, log_sum_tile)
        composed = _mix(
            weights, post, post_k, image, head, is_real, key + first_key, S, H, P,
            POST_QR + POST_QG + POST_B > 0, POST_KR, POST_KG, False, DOT,
        )  # fmt: skip
        tl.store(x + place, composed.to(x.dtype.element_ty), mask=inside)
        d_composed = tl.load(da + place, mask=inside, other=0.0).to(tl.float32)
        d_weights = _mix(
            d_composed, post, post_k, image, head, is_real, key + first_key, S, H, P,
            POST_QR + POST_QG + POST_B > 0, POST_KR, POST_KG, True, DOT,
        )  # fmt: skip
        dy = weights * (d_weights - row_sum_tile)
        if PRE_QR + PRE_QG + PRE_B > 0:
            d_matrices = dot(tl.permute(scores, (0, 2, 1)), dy, d_matrices, DOT)
        dx = _mix(
            dy, pre, pre_k, image, head, is_real, key + first_key, S, H, P,
            PRE_QR + PRE_QG + PRE_B > 0, PRE_KR, PRE_KG, True, DOT,
        )  # fmt: skip
        tl.store(da + place, dx.to(da.dtype.element_ty), mask=inside)
    end = (high + BK - 1) // BK * BK
    for workspace in tl.static_range(2):
        rows = (x if workspace == 0 else da) + row
        store_zeros(rows, 0, low, num_keys, in_chunk, BK)
        store_zeros(rows, end, num_keys, num_keys, in_chunk, BK)
    if PRE_QR + PRE_QG > 0:
        offsets = image.to(tl.int64) * T * (2 * PRE_QR + PRE_QG) * H + head
        store_weight_gradients(
            d_matrices, pre_q, d_pre_q, offsets, query + query0, H, in_chunk, False, P, PRE_QR, PRE_QG
        )
    if PRE_B:
        _store_base_sum(d_matrices, d_pre_base)


@triton.jit
def key_gradients(
    x, da, log_sum, row_sum, pre_q, pre_k, pre_base, post_q, post_k, post_base, d_pre_k, d_post_k, key_mask,
    num_instances, num_groups, group_heads, H, image0, T, S, query0, num_queries, first_key, num_keys, stride, window,
    P: tl.constexpr, PRE_QR: tl.constexpr, PRE_QG: tl.constexpr, PRE_KR: tl.constexpr, PRE_KG: tl.constexpr,
    PRE_B: tl.constexpr, POST_QR: tl.constexpr, POST_QG: tl.constexpr, POST_KR: tl.constexpr, POST_KG: tl.constexpr,
    POST_B: tl.constexpr, IS_CAUSAL: tl.constexpr, HAS_MASK: tl.constexpr, DOT: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """K: add the gradients of the key side of both compositions; keys are the batch side, queries the row side."""
    local, head, is_real = slot_heads(tl.program_id(1), num_instances, num_groups, group_heads, P)
    image = local + image0
    key = tl.program_id(0) * BK + tl.arange(0, BK)
    column = (local * H + head)[None, :] * (num_queries * stride) + key[:, None]
    in_chunk = (key < num_keys)[:, None] & is_real[None, :]
    token = tl.where(key < num_keys, key + first_key, S)
    pre = _matrices(pre_k, pre_base, image, head, is_real, token, S, H, group_heads, P, PRE_KR, PRE_KG, PRE_B)
    post = _matrices(post_k, post_base, image, head, is_real, token, S, H, group_heads, P, POST_KR, POST_KG, POST_B)
    d_pre = tl.zeros([BK, SLOTS, SLOTS], tl.float32)
    d_post = tl.zeros([BK, SLOTS, SLOTS], tl.float32)
    offset = query0 + S - T
    first = tl.program_id(0) * BK
    low, high = query_bounds(
        first, tl.minimum(first + BK, num_keys) - 1, num_queries, first_key, offset, window, IS_CAUSAL, BQ
    )
    for start in range(low, high, BQ):
        query = start + tl.arange(0, BQ)
        inside = in_chunk[:, None, :] & (query < num_queries)[None, :, None]
        place = column[:, None, :] + query[None, :, None] * stride
        scores = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        y = _mix(
            scores, pre, pre_q, image, head, is_real, query + query0, T, H, P,
            PRE_KR + PRE_KG + PRE_B > 0, PRE_QR, PRE_QG, False, DOT,
        )  # fmt: skip
        seen = tl.permute(
            _seen(
                query, key, key_mask, image, is_real, num_queries, num_keys, S, first_key, offset, window,
                IS_CAUSAL, HAS_MASK,
            ),
            (1, 0, 2),
        )  # fmt: skip
        statistics = ((image.to(tl.int64) * H + head) * T)[None, :] + (query + query0)[:, None]
        real_query = (query < num_queries)[:, None] & is_real[None, :]
        log_sum_tile = tl.load(log_sum + statistics, mask=real_query, other=EMPTY)[None, :, :]
        row_sum_tile = tl.load(row_sum + statistics, mask=real_query, other=0.0)[None, :, :]
        weights = _weights(y, seen, log_sum_tile)
        d_composed = tl.load(da + place, mask=inside, other=0.0).to(tl.float32)
        d_weights = _mix(
            d_composed, post, post_q, image, head, is_real, query + query0, T, H, P,
            POST_KR + POST_KG + POST_B > 0, POST_QR, POST_QG, True, DOT,
        )  # fmt: skip
        if POST_KR + POST_KG > 0:
            d_post = dot(tl.permute(weights, (0, 2, 1)), d_composed, d_post, DOT)
        if PRE_KR + PRE_KG > 0:
            dy = weights * (d_weights - row_sum_tile)
            d_pre = dot(tl.permute(scores, (0, 2, 1)), dy, d_pre, DOT)
    if PRE_KR + PRE_KG > 0:
        offsets = image.to(tl.int64) * S * (2 * PRE_KR + PRE_KG) * H + head
        store_weight_gradients(d_pre, pre_k, d_pre_k, offsets, token, H, in_chunk, True, P, PRE_KR, PRE_KG)
    if POST_KR + POST_KG > 0:
        offsets = image.to(tl.int64) * S * (2 * POST_KR + POST_KG) * H + head
        store_weight_gradients(d_post, post_k, d_post_k, offsets, token, H, in_chunk, True, P, POST_KR, POST_KG)
