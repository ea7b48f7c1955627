"""Tiles of scores and weights, and how heads are mixed in them: what the five kernels share.

A tile is [M, V, 16]: M tokens of the *matrix* side, whose 16 x 16 matrices are built once per program and applied by
batched products; V tokens of the *vector* side, whose composition stays low rank: a product with a block matrix of ones
sums over the heads of a group and puts the sum back on each of them. The last axis is 16 slots, which hold one group of
up to 16 heads, or two groups of up to 8, or four of up to 4, of the same or of different rows of the batch.

Packed weights of a token are 2R + gate *vectors* over the heads: R of `down`, R of `up`, and the gate.
"""

# B batch, T query tokens, S key tokens, H heads, R compose rank, G head groups; of a tile: M and V tokens of its sides

from typing import Any, NamedTuple

import triton
import triton.language as tl

SLOTS = tl.constexpr(16)
LOG2E = tl.constexpr(1.4426950408889634)
LANES = tl.constexpr(8)  # tokens of a tile's axis 1 that lie in different threads; the others lie in each


class Kind(NamedTuple):
    """What a call is, known when a kernel is compiled.

    Attributes:
        GROUP_SLOTS: Slots that hold a group: 4, 8 or 16.
        HEADS: Heads of a group.
        IS_CAUSAL: As in `composed_attention`.
        HAS_WINDOW: Whether there is a window.
        HAS_MASK: Whether there is a mask of keys.
        DOT: Dtype of the operands of products.
    """

    GROUP_SLOTS: int
    HEADS: int
    IS_CAUSAL: bool
    HAS_WINDOW: bool
    HAS_MASK: bool
    DOT: Any


class Form(NamedTuple):
    """Which branches a composition has, known when a kernel is compiled: ranks, and 1 or 0 for gates and the base."""

    QUERY_RANK: int
    QUERY_GATE: int
    KEY_RANK: int
    KEY_GATE: int
    BASE: int


class Slots(NamedTuple):
    """What each of the 16 slots of a program holds; a group of one row of the batch is an instance.

    Attributes:
        row: Row of the batch [16], counted from the chunk's first.
        head: Head of the call [16].
        column: Column of the head's packed weights [16], of which each group has GROUP_SLOTS.
        is_instance: Whether the slot belongs to an instance [16].
        is_real: Whether it holds a head [16].
    """

    row: Any
    head: Any
    column: Any
    is_instance: Any
    is_real: Any


@triton.jit
def slots_of(program, num_instances, num_groups, KIND: tl.constexpr):
    """Tell what the slots of a program hold: `Slots`."""
    slots = tl.arange(0, SLOTS)
    instance = program * (SLOTS // KIND.GROUP_SLOTS) + slots // KIND.GROUP_SLOTS
    group, in_group = instance % num_groups, slots % KIND.GROUP_SLOTS
    is_instance = instance < num_instances
    return Slots(
        row=instance // num_groups,
        head=group * KIND.HEADS + in_group,
        column=group * KIND.GROUP_SLOTS + in_group,
        is_instance=is_instance,
        is_real=is_instance & (in_group < KIND.HEADS),
    )


@triton.jit
def same_group(GROUP_SLOTS: tl.constexpr):
    """Make the block matrix [16, 16] that tells which slots belong to one group."""
    slots = tl.arange(0, SLOTS)
    return slots[:, None] // GROUP_SLOTS == slots[None, :] // GROUP_SLOTS


@triton.jit
def group_sum(M: tl.constexpr, KIND: tl.constexpr):
    """Make the matrices [M, 16, 16] whose product sums over a group and puts the sum on each of its slots."""
    return tl.broadcast_to(same_group(KIND.GROUP_SLOTS).to(KIND.DOT)[None, :, :], [M, SLOTS, SLOTS])


@triton.jit
def diagonal(gate):
    """Make diagonal matrices [M, 16, 16] of [M, 16]."""
    slots = tl.arange(0, SLOTS)
    return tl.where((slots[:, None] == slots[None, :])[None, :, :], gate[:, :, None], 0.0)


@triton.jit
def load_vectors(packed, row, num_tokens, tokens, mask, slots, width, RANK: tl.constexpr, GATE: tl.constexpr):
    """Load the packed weights [B, num_tokens, 2R + gate, width] of a tile's tokens: a tuple of vectors [tokens, 16]."""
    COUNT: tl.constexpr = 2 * RANK + GATE
    offsets = row.to(tl.int64) * num_tokens * COUNT * width + slots.column  # [16]
    vectors = ()
    for r in tl.static_range(COUNT):
        pointers = packed + offsets[None, :] + ((tokens * COUNT + r) * width)[:, None]
        vectors = vectors + (tl.load(pointers, mask=mask, other=0.0),)  # [tokens, 16]
    return vectors


@triton.jit
def token_matrices(
    vectors, base, slots, M: tl.constexpr, RANK: tl.constexpr, GATE: tl.constexpr, BASE: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Build sum_r down_r^T up_r + diag(gate) + base for each token of the matrix side: [M, 16, 16]."""
    matrices = tl.zeros([M, SLOTS, SLOTS], tl.float32)
    for r in tl.static_range(RANK):
        matrices += vectors[r].to(tl.float32)[:, :, None] * vectors[RANK + r].to(tl.float32)[:, None, :]
    in_group = same_group(KIND.GROUP_SLOTS)
    matrices = tl.where(in_group[None, :, :], matrices, 0.0)
    if GATE:
        matrices += diagonal(vectors[2 * RANK].to(tl.float32))
    if BASE:
        mask = in_group & slots.is_real[:, None] & slots.is_real[None, :]
        pointers = base + slots.head[:, None] * KIND.HEADS + (slots.head % KIND.HEADS)[None, :]
        matrices += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)[None, :, :]  # [16, 16]
    return matrices.to(KIND.DOT)


@triton.jit
def mix(
    x, x_dot, matrices, vectors, sums, MATRIX: tl.constexpr, RANK: tl.constexpr, GATE: tl.constexpr,
    BACK: tl.constexpr = False,
):  # fmt: skip
    """Compose a tile: x by the matrix side's matrices, if MATRIX, and by the vector side's weights.

    `x` is float32, `x_dot` the same in the dtype of products. To take gradients BACK matrices come transposed, and
    down and up vectors change places.
    """
    DOWN: tl.constexpr = RANK if BACK else 0
    UP: tl.constexpr = 0 if BACK else RANK
    y = x  # [M, V, 16]
    if MATRIX:
        y = tl.dot(x_dot, matrices, y, input_precision="ieee")  # [M, V, 16] @ [M, 16, 16]
    if GATE:
        y += x * vectors[2 * RANK].to(tl.float32)[None, :, :]
    for r in tl.static_range(RANK):
        inner = x_dot * vectors[DOWN + r].to(x_dot.dtype)[None, :, :]
        summed = tl.dot(inner, sums, tl.zeros(x.shape, tl.float32), input_precision="ieee")  # @ [M, 16, 16]
        y += summed * vectors[UP + r].to(tl.float32)[None, :, :]
    return y


@triton.jit
def outer_sum(a, b, total):
    """Add the sums over the vector side of a^T b to `total` [M, 16, 16]."""
    return tl.dot(tl.permute(a, (0, 2, 1)), b, total, input_precision="ieee")  # [M, 16, V] @ [M, V, 16]


@triton.jit
def within_threads(x):
    """See a tile [M, V, 16] as [M, V / 8, 8, 16], of which axis 1 lies within a thread."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // LANES, LANES, SLOTS])


@triton.jit
def store_vector_gradients(
    matrices, vectors, pointers, width, mask, RANK: tl.constexpr, GATE: tl.constexpr, KIND: tl.constexpr
):
    """Reduce the gradients of token matrices [M, 16, 16] to those of the packed weights, and store them [M, 16]."""
    matrices = tl.where(same_group(KIND.GROUP_SLOTS)[None, :, :], matrices, 0.0)
    for r in tl.static_range(RANK):
        down, up = vectors[r].to(tl.float32), vectors[RANK + r].to(tl.float32)
        tl.store(pointers + r * width, tl.sum(matrices * up[:, None, :], 2), mask=mask)
        tl.store(pointers + (RANK + r) * width, tl.sum(matrices * down[:, :, None], 1), mask=mask)
    if GATE:
        slots = tl.arange(0, SLOTS)
        gates = tl.where((slots[:, None] == slots[None, :])[None, :, :], matrices, 0.0)
        tl.store(pointers + 2 * RANK * width, tl.sum(gates, 2), mask=mask)


@triton.jit
def hidden_bias(position, token, S, window, KIND: tl.constexpr):
    """Make -inf where a query at `position` does not see the key `token`, 0 where it does; the two are broadcast."""
    distance = position - token
    seen = (token >= 0) & (token < S)
    if KIND.IS_CAUSAL:
        seen = seen & (distance >= 0)
    if KIND.HAS_WINDOW:
        seen = seen & (distance < window)
        if not KIND.IS_CAUSAL:
            seen = seen & (distance > -window)
    return tl.where(seen, 0.0, -float("inf"))


@triton.jit
def mask_of_keys(key_mask, row, is_instance, token, S, KIND: tl.constexpr):
    """Tell which tokens a mask of keys [B, S] lets the slots' rows see: [tokens, 16], or [tokens, 1] of one row."""
    is_token = (token >= 0) & (token < S)
    if KIND.GROUP_SLOTS == SLOTS:
        seen = tl.load(key_mask + tl.min(row, 0).to(tl.int64) * S + token, mask=is_token, other=0)[:, None]
    else:
        pointers = key_mask + row.to(tl.int64)[None, :] * S + token[:, None]
        seen = tl.load(pointers, mask=is_token[:, None] & is_instance[None, :], other=0)
    return seen != 0


@triton.jit
def exponents(y, bias, seen, KIND: tl.constexpr):
    """Turn scores into exponents of 2, -inf where the bias is; what a mask of keys hides may hold anything."""
    y = y * LOG2E + bias
    if KIND.HAS_MASK:
        y = tl.where(seen, y, -float("inf"))
    return y


@triton.jit
def key_bounds(first, last, num_keys, S, first_key, window, KIND: tl.constexpr, TILE: tl.constexpr):
    """Bound the keys, of a block's, that queries at positions [first, last] may see: from a multiple of TILE."""
    low = tl.maximum(0, -first_key)
    high = tl.minimum(num_keys, S - first_key)
    if KIND.HAS_WINDOW:
        low = tl.maximum(low, first - first_key - window + 1)
        high = tl.minimum(high, last - first_key + window)
    if KIND.IS_CAUSAL:
        high = tl.minimum(high, last - first_key + 1)
    low = low // TILE * TILE
    return low, tl.maximum(low, high)


@triton.jit
def query_bounds(first, last, num_queries, position0, window, KIND: tl.constexpr, TILE: tl.constexpr):
    """Bound the queries, of a block's, that may see the keys [first, last], likewise."""
    low = 0
    high = num_queries
    if KIND.HAS_WINDOW:
        low = tl.maximum(low, first - position0 - window + 1)
        high = tl.minimum(high, last - position0 + window)
    if KIND.IS_CAUSAL:
        low = tl.maximum(low, first - position0)
    low = low // TILE * TILE
    return low, tl.maximum(low, high)


@triton.jit
def split_range(low, high, split, num_splits, TILE: tl.constexpr):
    """Give a program its share of a range, in whole tiles."""
    share = tl.cdiv(tl.cdiv(high - low, num_splits), TILE) * TILE
    return low + split * share, tl.minimum(high, low + (split + 1) * share)


@triton.jit
def store_zeros(pointers, start, stop, num_keys, mask, TILE: tl.constexpr):
    """Write zeros to the keys from `start`, a multiple of TILE, to `stop`; `pointers` [M, 16] are those of key 0."""
    for begin in range(start, stop, TILE):
        key = tl.multiple_of(begin, TILE) + tl.arange(0, TILE)
        inside = mask[:, None, :] & (key < num_keys)[None, :, None]
        tl.store(pointers[:, None, :] + key[None, :, None], 0.0, mask=inside)
