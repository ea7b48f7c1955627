"""Statistics per query and head, such as the base-2 log-sum-exp, accumulated over tiles."""

# B batch, T query tokens, H heads; of a tile: BLOCK_M queries, BLOCK_N keys

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .head_mixing import LANES, SLOTS, within_threads

EMPTY = tl.constexpr(1e30)  # log-sum-exp of a query without visible keys: its weights become 0


class Running(NamedTuple):
    """Running statistics of the exponents of a program's queries, per thread: per block [BLOCK_M, 8, 16].

    Attributes:
        largest: Maximum exponent.
        total: The sum of 2^(exponent - largest).
    """

    largest: Any
    total: Any


@triton.jit
def empty_stats(BLOCK_M: tl.constexpr, KIND: tl.constexpr):
    """Initial `Running` statistics."""
    largest, total = (), ()
    for _ in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        largest = largest + (tl.full([BLOCK_M, LANES, SLOTS], -EMPTY, tl.float32),)
        total = total + (tl.zeros([BLOCK_M, LANES, SLOTS], tl.float32),)
    return Running(largest=largest, total=total)


@triton.jit
def update_stats(running, exponents, KIND: tl.constexpr):
    """Add a tile of exponents of 2, per block [BLOCK_M, BLOCK_N, 16], to `Running`."""
    largest, total = (), ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        here = within_threads(exponents[b])  # [BLOCK_M, BLOCK_N / 8, 8, 16]
        top = tl.maximum(running.largest[b], tl.max(here, 1))
        largest = largest + (top,)
        rescaled = running.total[b] * tl.exp2(running.largest[b] - top)
        total = total + (rescaled + tl.sum(tl.exp2(here - top[:, None, :, :]), 1),)
    return Running(largest=largest, total=total)


@triton.jit
def lse_of(running, nothing, KIND: tl.constexpr):
    """Log-sum-exp per block [BLOCK_M, 16]; `nothing` for queries without visible keys."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        top = tl.max(running.largest[b], 1)
        scaled = tl.maximum(running.total[b] * tl.exp2(running.largest[b] - top[:, None, :]), 0.0)  # no fma
        whole = tl.sum(scaled, 1)  # in one thread, as different orders of summation would give different bits
        result = result + (tl.where(whole > 0, top + tl.log2(tl.where(whole > 0, whole, 1.0)), nothing),)
    return result


@triton.jit
def load_statistics(statistics, slots, query, mask, sizes, EMPTY, KIND: tl.constexpr):
    """Load values of queries and heads from [B, H, T], per block [queries, 16]."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        plane = (slots.row + sizes.row0).to(tl.int64) * sizes.H + slots.head[b]
        places = (plane * sizes.T)[None, :] + query[:, None]
        result = result + (tl.load(statistics + places, mask=mask[b], other=EMPTY),)
    return result


@triton.jit
def store_statistics(statistics, tile, sizes, values, KIND: tl.constexpr):
    """Store values of a tile's queries and heads, per block [BLOCK_M, 16], to [num_splits, rows, H, num_queries]."""
    num_rows = sizes.num_instances // sizes.num_groups
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        plane = (tile.split * num_rows + tile.slots.row) * sizes.H + tile.slots.head[b]
        places = (plane * sizes.num_queries)[None, :] + tile.query[:, None]
        tl.store(statistics + places, values[b], mask=tile.mask[b])


@triton.jit
def along_keys(blocks, KIND: tl.constexpr):
    """Insert an axis of keys into values of a tile's queries, per block [BLOCK_M, 16]."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (blocks[b][:, None, :],)
    return result
