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


@triton.jit
def slot_heads(program, num_instances, num_groups, group_heads, P: tl.constexpr):
    """Tell which image and head each slot holds, and whether it holds one; a group of one image is an instance."""
    slots = tl.arange(0, SLOTS)
    instance = program * (SLOTS // P) + slots // P
    position = slots % P
    image = instance // num_groups
    head = instance % num_groups * group_heads + position
    return image, head, (instance < num_instances) & (position < group_heads)


@triton.jit
def same_group(P: tl.constexpr):
    """Make the block matrix [16, 16] that is 1 where two slots belong to one group."""
    slots = tl.arange(0, SLOTS)
    return (slots[:, None] // P == slots[None, :] // P).to(tl.float32)


@triton.jit
def load_weight(w, slot_offsets, tokens, row, ROWS: tl.constexpr, H, mask):
    """Load one row of packed weights [B, tokens, ROWS, H] for a tile's tokens: [tokens, 16], float32."""
    pointers = w + slot_offsets[None, :] + (tokens * ROWS + row)[:, None] * H
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_base(base, head, group_heads, is_real, P: tl.constexpr):
    """Load the static base [G, H/G, H/G] as a block matrix [16, 16] (from, to)."""
    slots = tl.arange(0, SLOTS)
    mask = (slots[:, None] // P == slots[None, :] // P) & is_real[:, None] & is_real[None, :]
    pointers = base + head[:, None] * group_heads + (head % group_heads)[None, :]
    return tl.load(pointers, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def batch_matrices(w, slot_offsets, tokens, H, mask, P: tl.constexpr, RANK: tl.constexpr, GATE: tl.constexpr):
    """Build sum_r down_r^T up_r + diag(gate) for each token: [tokens, 16, 16], float32."""
    ROWS: tl.constexpr = 2 * RANK + GATE
    matrices = tl.zeros([tokens.shape[0], SLOTS, SLOTS], tl.float32)
    for r in tl.static_range(RANK):
        down = load_weight(w, slot_offsets, tokens, r, ROWS, H, mask)
        up = load_weight(w, slot_offsets, tokens, RANK + r, ROWS, H, mask)
        matrices += down[:, :, None] * up[:, None, :]
    matrices *= same_group(P)[None, :, :]
    if GATE:
        gate = load_weight(w, slot_offsets, tokens, 2 * RANK, ROWS, H, mask)
        slots = tl.arange(0, SLOTS)
        matrices += tl.where((slots[:, None] == slots[None, :])[None, :, :], gate[:, :, None], 0.0)
    return matrices


@triton.jit
def dot(a, b, acc, DOT: tl.constexpr):
    """Multiply with operands in DOT, added to a float32 tensor."""
    return tl.dot(a.to(DOT), b.to(DOT), acc, input_precision="ieee")


@triton.jit
def row_mix(
    x, y, w, slot_offsets, tokens, H, mask, P: tl.constexpr, RANK: tl.constexpr, GATE: tl.constexpr,
    TRANSPOSED: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Add to y what the row side's weights make of x [N, M, 16]; TRANSPOSED takes gradients back."""
    ROWS: tl.constexpr = 2 * RANK + GATE
    N: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    ones = same_group(P)
    for r in tl.static_range(RANK):
        down = load_weight(w, slot_offsets, tokens, r, ROWS, H, mask)
        up = load_weight(w, slot_offsets, tokens, RANK + r, ROWS, H, mask)
        if TRANSPOSED:
            inner = x * up[None, :, :]
        else:
            inner = x * down[None, :, :]
        zero = tl.zeros([N * M, SLOTS], tl.float32)
        summed = tl.reshape(dot(tl.reshape(inner, [N * M, SLOTS]), ones, zero, DOT), [N, M, SLOTS])
        if TRANSPOSED:
            y += summed * down[None, :, :]
        else:
            y += summed * up[None, :, :]
    if GATE:
        y += x * load_weight(w, slot_offsets, tokens, 2 * RANK, ROWS, H, mask)[None, :, :]
    return y


@triton.jit
def store_weight_gradients(
    matrices, w, dw, slot_offsets, tokens, H, mask, ACCUMULATE: tl.constexpr, P: tl.constexpr, RANK: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """Reduce the gradients of the batch matrices [tokens, 16, 16] to those of the packed weights, and store or add."""
    ROWS: tl.constexpr = 2 * RANK + GATE
    matrices = matrices * same_group(P)[None, :, :]
    pointers = dw + slot_offsets[None, :] + (tokens * ROWS)[:, None] * H
    for r in tl.static_range(RANK):
        down = load_weight(w, slot_offsets, tokens, r, ROWS, H, mask)
        up = load_weight(w, slot_offsets, tokens, RANK + r, ROWS, H, mask)
        d_down = tl.sum(matrices * up[:, None, :], 2)
        d_up = tl.sum(matrices * down[:, :, None], 1)
        if ACCUMULATE:
            d_down += tl.load(pointers + r * H, mask=mask, other=0.0)
            d_up += tl.load(pointers + (RANK + r) * H, mask=mask, other=0.0)
        tl.store(pointers + r * H, d_down, mask=mask)
        tl.store(pointers + (RANK + r) * H, d_up, mask=mask)
    if GATE:
        slots = tl.arange(0, SLOTS)
        d_gate = tl.sum(tl.where((slots[:, None] == slots[None, :])[None, :, :], matrices, 0.0), 2)
        if ACCUMULATE:
            d_gate += tl.load(pointers + 2 * RANK * H, mask=mask, other=0.0)
        tl.store(pointers + 2 * RANK * H, d_gate, mask=mask)


@triton.jit
def visible(query, key, num_queries, num_keys, first_key, offset, IS_CAUSAL: tl.constexpr, window):
    """Tell which pairs [queries, keys] of a chunk may attend; a window of 0 is none.

    `offset` is the position of the chunk's first query, S - T included; `first_key` that of its first key.
    """
    distance = (query + offset)[:, None] - (key + first_key)[None, :]
    seen = (query < num_queries)[:, None] & (key < num_keys)[None, :]
    if IS_CAUSAL:
        seen = seen & (distance >= 0)
    seen = seen & ((window == 0) | (distance < window))
    if not IS_CAUSAL:
        seen = seen & ((window == 0) | (distance > -window))
    return seen


@triton.jit
def key_bounds(first, last, num_keys, first_key, offset, window, IS_CAUSAL: tl.constexpr, TILE: tl.constexpr):
    """Bound the keys of a chunk that its queries [first, last] may see, from a multiple of TILE to an exclusive end."""
    low = 0
    high = num_keys
    if window > 0:
        low = tl.maximum(0, first + offset - first_key - window + 1) // TILE * TILE
        high = tl.minimum(num_keys, last + offset - first_key + window)
    if IS_CAUSAL:
        high = tl.minimum(num_keys, last + offset - first_key + 1)
    return low, tl.maximum(low, high)


@triton.jit
def query_bounds(first, last, num_queries, first_key, offset, window, IS_CAUSAL: tl.constexpr, TILE: tl.constexpr):
    """Bound the queries of a chunk that may see its keys [first, last], likewise."""
    low = 0
    high = num_queries
    if window > 0:
        low = tl.maximum(0, first + first_key - offset - window + 1) // TILE * TILE
        high = tl.minimum(num_queries, last + first_key - offset + window)
    if IS_CAUSAL:
        low = tl.maximum(0, first + first_key - offset) // TILE * TILE
    return low, tl.maximum(low, high)


@triton.jit
def store_zeros(pointers, start, stop, num_keys, mask, TILE: tl.constexpr):
    """Write zeros to the rows' tiles from `start`, a multiple of TILE, to `stop`."""
    for begin in range(start, stop, TILE):
        key = begin + tl.arange(0, TILE)
        inside = mask[:, None, :] & (key < num_keys)[None, :, None]
        place = pointers[:, None, :] + key[None, :, None]
        tl.store(place, 0.0, mask=inside)
