"""Numbers per query and head, such as base-2 logarithms of sums of exponentials, which are summed tile by tile."""

# B batch, T query tokens, H heads; of a tile: BQ queries, BK keys

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .head_mixing import LANES, SLOTS, within_threads

EMPTY = tl.constexpr(1e30)  # the log-sum of a query with no visible key: its weights become 0


class Running(NamedTuple):
    """What the threads of a program have seen of the exponents of its queries: of each block [BQ, 8, 16].

    Attributes:
        largest: The largest.
        total: The sum of 2^(exponent - largest).
    """

    largest: Any
    total: Any


@triton.jit
def nothing_seen(BLOCK_M: tl.constexpr, KIND: tl.constexpr):
    """Begin: `Running`."""
    largest, total = (), ()
    for _ in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        largest = largest + (tl.full([BLOCK_M, LANES, SLOTS], -EMPTY, tl.float32),)
        total = total + (tl.zeros([BLOCK_M, LANES, SLOTS], tl.float32),)
    return Running(largest=largest, total=total)


@triton.jit
def see(running, exponents, KIND: tl.constexpr):
    """Add a tile of exponents of 2, of each block [BQ, BK, 16]: `Running`."""
    largest, total = (), ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        here = within_threads(exponents[b])  # [BQ, BK / 8, 8, 16]
        top = tl.maximum(running.largest[b], tl.max(here, 1))
        largest = largest + (top,)
        rescaled = running.total[b] * tl.exp2(running.largest[b] - top)
        total = total + (rescaled + tl.sum(tl.exp2(here - top[:, None, :, :]), 1),)
    return Running(largest=largest, total=total)


@triton.jit
def lse_of(running, nothing, KIND: tl.constexpr):
    """End: log-sums of each block [BQ, 16]; `nothing` where no key is visible."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        top = tl.max(running.largest[b], 1)
        scaled = tl.maximum(running.total[b] * tl.exp2(running.largest[b] - top[:, None, :]), 0.0)  # no product within
        whole = tl.sum(scaled, 1)  # the sum: threads that add it up in other orders would store other bits
        result = result + (tl.where(whole > 0, top + tl.log2(tl.where(whole > 0, whole, 1.0)), nothing),)
    return result


@triton.jit
def load_statistics(statistics, slots, query, mask, sizes, EMPTY, KIND: tl.constexpr):
    """Load numbers of queries and heads from [B, H, T], of each block [queries, 16]."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        plane = (slots.row + sizes.row0).to(tl.int64) * sizes.H + slots.head[b]
        places = (plane * sizes.T)[None, :] + query[:, None]
        result = result + (tl.load(statistics + places, mask=mask[b], other=EMPTY),)
    return result


@triton.jit
def store_statistics(statistics, tile, sizes, values, KIND: tl.constexpr):
    """Store numbers of a tile's queries and heads, of each block [BQ, 16], to [num_splits, rows, H, num_queries]."""
    num_rows = sizes.num_instances // sizes.num_groups
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        plane = (tile.split * num_rows + tile.slots.row) * sizes.H + tile.slots.head[b]
        places = (plane * sizes.num_queries)[None, :] + tile.query[:, None]
        tl.store(statistics + places, values[b], mask=tile.mask[b])


@triton.jit
def along_keys(blocks, KIND: tl.constexpr):
    """Give numbers of a tile's queries, of each block [BQ, 16], an axis of keys."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (blocks[b][:, None, :],)
    return result
