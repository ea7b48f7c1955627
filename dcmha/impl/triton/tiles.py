"""Tiles of scores and weights, and how heads are mixed in them: what the five kernels share.

A tile is [N, M, 16]: N tokens of the *batch* side, whose 16 x 16 matrices are built once per program and applied by
batched products; M tokens of the *row* side, whose composition stays low rank: a product with a block matrix of ones
sums over the heads of a group and puts the sum back on each of them. The last axis is 16 slots, which hold one group of
up to 16 heads, or two groups of up to 8, or four of up to 4, of the same or of different images.
"""

# B batch, T query tokens, S key tokens, H heads, R compose rank, G head groups, P slots of a group

import triton
import triton.language as tl

SLOTS = tl.constexpr(16)
LOG2E = tl.constexpr(1.4426950408889634)
LANES = tl.constexpr(8)  # rows of a product that lie in different threads; the rest of the rows lie in each


@triton.jit
def slot_heads(program, num_instances, num_groups, P: tl.constexpr, HEADS: tl.constexpr):
    """Tell what each slot holds; a group of one image is an instance.

    Returns:
        image, head: Of the slot [16].
        column: Of its packed weights, which have P columns for each group.
        is_instance: Whether the slot belongs to an instance.
        is_real: Whether it holds a head.
    """
    slots = tl.arange(0, SLOTS)
    instance = program * (SLOTS // P) + slots // P
    group = instance % num_groups
    is_instance = instance < num_instances
    is_real = is_instance & (slots % P < HEADS)
    return instance // num_groups, group * HEADS + slots % P, group * P + slots % P, is_instance, is_real


@triton.jit
def same_group(P: tl.constexpr):
    """Make the block matrix [16, 16] that tells which slots belong to one group."""
    slots = tl.arange(0, SLOTS)
    return slots[:, None] // P == slots[None, :] // P


@triton.jit
def group_sum(N: tl.constexpr, P: tl.constexpr, DOT: tl.constexpr):
    """Make the matrices [N, 16, 16] whose product sums over a group and puts the sum on each of its slots."""
    return tl.broadcast_to(same_group(P).to(DOT)[None, :, :], [N, SLOTS, SLOTS])


@triton.jit
def diagonal(gate):
    """Make diagonal matrices [N, 16, 16] of [N, 16]."""
    slots = tl.arange(0, SLOTS)
    return tl.where((slots[:, None] == slots[None, :])[None, :, :], gate[:, :, None], 0.0)


@triton.jit
def load_weights(w, image, num_tokens, column, width, tokens, mask, ROWS: tl.constexpr):
    """Load the packed weights [B, num_tokens, ROWS, width] of a tile's tokens: a tuple of ROWS times [tokens, 16]."""
    offsets = image.to(tl.int64) * num_tokens * ROWS * width + column
    rows = ()
    for r in tl.static_range(ROWS):
        pointers = w + offsets[None, :] + ((tokens * ROWS + r) * width)[:, None]
        rows = rows + (tl.load(pointers, mask=mask, other=0.0),)
    return rows


@triton.jit
def batch_matrices(
    rows, base, head, is_real, N: tl.constexpr, P: tl.constexpr, HEADS: tl.constexpr, RANK: tl.constexpr,
    GATE: tl.constexpr, BASE: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Build sum_r down_r^T up_r + diag(gate) + base for each token of the batch side: [N, 16, 16]."""
    matrices = tl.zeros([N, SLOTS, SLOTS], tl.float32)
    for r in tl.static_range(RANK):
        matrices += rows[r].to(tl.float32)[:, :, None] * rows[RANK + r].to(tl.float32)[:, None, :]
    matrices = tl.where(same_group(P)[None, :, :], matrices, 0.0)
    if GATE:
        matrices += diagonal(rows[2 * RANK].to(tl.float32))
    if BASE:
        mask = same_group(P) & is_real[:, None] & is_real[None, :]
        pointers = base + head[:, None] * HEADS + (head % HEADS)[None, :]
        matrices += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)[None, :, :]
    return matrices.to(DOT)


@triton.jit
def mix(
    x, x16, matrices, rows, sums, BATCH: tl.constexpr, RANK: tl.constexpr, GATE: tl.constexpr, DOWN: tl.constexpr,
    UP: tl.constexpr,
):  # fmt: skip
    """Compose a tile: x by the batch side's matrices and the row side's weights, of which DOWN and UP are the first.

    `x` is float32, `x16` the same as products take it. Matrices transposed and DOWN and UP exchanged take gradients
    back.
    """
    y = x
    if BATCH:
        y = tl.dot(x16, matrices, y, input_precision="ieee")
    if GATE:
        y += x * rows[2 * RANK].to(tl.float32)[None, :, :]
    for r in tl.static_range(RANK):
        inner = x16 * rows[DOWN + r].to(x16.dtype)[None, :, :]
        summed = tl.dot(inner, sums, tl.zeros(x.shape, tl.float32), input_precision="ieee")
        y += summed * rows[UP + r].to(tl.float32)[None, :, :]
    return y


@triton.jit
def outer_sum(a, b, total):
    """Add the sums over rows of a^T b, [N, 16, 16]."""
    return tl.dot(tl.permute(a, (0, 2, 1)), b, total, input_precision="ieee")


@triton.jit
def within_threads(x):
    """See rows [N, M, 16] as [N, M / 8, 8, 16], of which axis 1 lies within a thread."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // LANES, LANES, SLOTS])


@triton.jit
def store_weight_gradients(
    matrices, rows, pointers, width, mask, P: tl.constexpr, RANK: tl.constexpr, GATE: tl.constexpr
):
    """Reduce the gradients of the batch matrices [N, 16, 16] to those of the packed weights, and store them."""
    matrices = tl.where(same_group(P)[None, :, :], matrices, 0.0)
    for r in tl.static_range(RANK):
        down, up = rows[r].to(tl.float32), rows[RANK + r].to(tl.float32)
        tl.store(pointers + r * width, tl.sum(matrices * up[:, None, :], 2), mask=mask)
        tl.store(pointers + (RANK + r) * width, tl.sum(matrices * down[:, :, None], 1), mask=mask)
    if GATE:
        slots = tl.arange(0, SLOTS)
        gates = tl.where((slots[:, None] == slots[None, :])[None, :, :], matrices, 0.0)
        tl.store(pointers + 2 * RANK * width, tl.sum(gates, 2), mask=mask)


@triton.jit
def hidden_bias(position, token, S, window, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """Make -inf where a query at `position` does not see the key `token`, 0 where it does; the two are broadcast."""
    distance = position - token
    seen = (token >= 0) & (token < S)
    if IS_CAUSAL:
        seen = seen & (distance >= 0)
    if HAS_WINDOW:
        seen = seen & (distance < window)
        if not IS_CAUSAL:
            seen = seen & (distance > -window)
    return tl.where(seen, 0.0, -float("inf"))


@triton.jit
def mask_of_keys(key_mask, image, token, S, is_instance, P: tl.constexpr):
    """Tell which tokens a mask of keys [B, S] lets the slots' images see: [tokens, 16], or [tokens, 1] of one image."""
    is_token = (token >= 0) & (token < S)
    if P == SLOTS:
        seen = tl.load(key_mask + tl.min(image, 0).to(tl.int64) * S + token, mask=is_token, other=0)[:, None]
    else:
        pointers = key_mask + image.to(tl.int64)[None, :] * S + token[:, None]
        seen = tl.load(pointers, mask=is_token[:, None] & is_instance[None, :], other=0)
    return seen != 0


@triton.jit
def exponents(y, bias, seen, HAS_MASK: tl.constexpr):
    """Turn scores into exponents of 2, -inf where the bias is; what a mask of keys hides may hold anything."""
    y = y * LOG2E + bias
    if HAS_MASK:
        y = tl.where(seen, y, -float("inf"))
    return y


@triton.jit
def key_bounds(
    first, last, num_keys, S, first_key, window, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, TILE: tl.constexpr
):
    """Bound the keys, of a block's, that queries at positions [first, last] may see: from a multiple of TILE."""
    low = tl.maximum(0, -first_key)
    high = tl.minimum(num_keys, S - first_key)
    if HAS_WINDOW:
        low = tl.maximum(low, first - first_key - window + 1)
        high = tl.minimum(high, last - first_key + window)
    if IS_CAUSAL:
        high = tl.minimum(high, last - first_key + 1)
    low = low // TILE * TILE
    return low, tl.maximum(low, high)


@triton.jit
def query_bounds(
    first, last, num_queries, position0, window, IS_CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, TILE: tl.constexpr
):
    """Bound the queries, of a block's, that may see the keys [first, last], likewise."""
    low = 0
    high = num_queries
    if HAS_WINDOW:
        low = tl.maximum(low, first - position0 - window + 1)
        high = tl.minimum(high, last - position0 + window)
    if IS_CAUSAL:
        low = tl.maximum(low, first - position0)
    low = low // TILE * TILE
    return low, tl.maximum(low, high)


@triton.jit
def split_range(low, high, split, num_splits, TILE: tl.constexpr):
    """Give a program its share of a range, in whole tiles."""
    share = tl.cdiv(tl.cdiv(high - low, num_splits), TILE) * TILE
    return low + split * share, tl.minimum(high, low + (split + 1) * share)


@triton.jit
def store_zeros(rows, start, stop, num_keys, mask, TILE: tl.constexpr):
    """Write zeros to the rows' tiles from `start`, a multiple of TILE, to `stop`."""
    for begin in range(start, stop, TILE):
        key = tl.multiple_of(begin, TILE) + tl.arange(0, TILE)
        inside = mask[:, None, :] & (key < num_keys)[None, :, None]
        tl.store(rows[:, None, :] + key[None, :, None], 0.0, mask=inside)
