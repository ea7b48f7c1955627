"""Visibility, masks and dropout in tiles, and ranges of visible keys or queries."""

# B batch, T query tokens, S key tokens, H heads; of a tile: M and V tokens of its matrix and its vector side

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .. import dropout
from .head_mixing import SLOTS

LOG2E = tl.constexpr(1.4426950408889634)
FIRST, SECOND = tl.constexpr(dropout.FIRST), tl.constexpr(dropout.SECOND)
HEAD, ROW, COLUMN = tl.constexpr(dropout.HEAD), tl.constexpr(dropout.ROW), tl.constexpr(dropout.COLUMN)
FAR = tl.constexpr(2**30)  # larger than every token position


class Masks(NamedTuple):
    """Tensors for masking and dropout; None if the call has none.

    Attributes:
        pairs: Mask: bytes, or floats that are added, with any strides over [B, H, T, S].
        starts: First token of each token's document [B, S].
        stops: End of the document, exclusive [B, S].
        seed: Dropout seed [2].
    """

    pairs: Any
    starts: Any
    stops: Any
    seed: Any


@triton.jit
def hidden_bias(position, token, S, window_size, KIND: tl.constexpr):
    """Bias of a query at `position` and a key `token`: -inf if hidden, else 0; the two are broadcast."""
    distance = position - token
    seen = (token >= 0) & (token < S)
    if KIND.IS_CAUSAL:
        seen = seen & (distance >= 0)
    if KIND.HAS_WINDOW:
        seen = seen & (distance < window_size)
        if not KIND.IS_CAUSAL:
            seen = seen & (distance > -window_size)
    return tl.where(seen, 0.0, -float("inf"))


@triton.jit
def load_documents(masks, row, tokens, inside, is_instance, S, KIND: tl.constexpr):
    """Load the bounds of tokens' documents: [tokens, 1] twice, or [tokens, 16] for several batch rows.

    Invalid tokens get bounds that affect neither the minimum of starts nor the maximum of stops.
    """
    if KIND.GROUP_SLOTS >= SLOTS:
        places, mask = tl.min(row, 0).to(tl.int64) * S + tokens[:, None], inside[:, None]
    else:
        places, mask = row.to(tl.int64)[None, :] * S + tokens[:, None], inside[:, None] & is_instance[None, :]
    starts = tl.load(masks.starts + places, mask=mask, other=FAR)
    return starts, tl.load(masks.stops + places, mask=mask, other=0)


@triton.jit
def other_documents(bias, token, starts, stops):
    """Set a bias to -inf for keys outside the query's document; all are broadcast."""
    return tl.where((token >= starts) & (token < stops), bias, -float("inf"))


@triton.jit
def load_pairs(
    masks, slots, sizes, m_offsets, v_offsets, m_inside, v_inside, KIND: tl.constexpr
):  # fmt: skip
    """Load a tile of the mask, per block [M or 1, V or 1, 16 or 1].

    Offsets and masks are those of the tokens of both sides; those of queries have one element if the mask depends on
    keys only.
    """
    row = (slots.row + sizes.row0).to(tl.int64) * sizes.mask_row
    places = (m_offsets[:, None] + v_offsets[None, :])[:, :, None]
    inside = (m_inside[:, None] & v_inside[None, :])[:, :, None]
    result = ()
    if KIND.MASK_HEADS:
        for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            planes = (row + slots.head[b].to(tl.int64) * sizes.mask_head)[None, None, :]
            here = inside & slots.is_real[b][None, None, :]
            result = result + (tl.load(masks.pairs + places + planes, mask=here, other=0),)
    else:
        if KIND.GROUP_SLOTS >= SLOTS:
            seen = tl.load(masks.pairs + places + tl.min(row, 0), mask=inside, other=0)
        else:
            here = inside & slots.is_instance[None, None, :]
            seen = tl.load(masks.pairs + places + row[None, None, :], mask=here, other=0)
        for _ in tl.static_range(tl.constexpr(KIND.BLOCKS)):
            result = result + (seen,)
    return result


@triton.jit
def query_offsets(token, inside, sizes, KIND: tl.constexpr):
    """Offsets of queries in the mask, and their validity; one element if the mask depends on keys only."""
    if KIND.MASK_QUERIES:
        return token.to(tl.int64) * sizes.mask_query, inside
    else:
        return tl.zeros([1], tl.int64), tl.full([1], True, tl.int1)


@triton.jit
def exponents(y, bias, pairs, KIND: tl.constexpr):
    """Convert composed scores to exponents of 2, -inf for hidden keys, whose scores may be arbitrary."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        if KIND.MASK == 1:
            exponent = tl.where(pairs[b] != 0, y[b] * LOG2E + bias, -float("inf"))
        elif KIND.MASK == 2:
            added = pairs[b].to(tl.float32)
            exponent = tl.where(added > -float("inf"), (y[b] + added) * LOG2E + bias, -float("inf"))
        else:
            exponent = y[b] * LOG2E + bias
        result = result + (exponent,)
    return result


@triton.jit
def weights_of(exponent, lse, KIND: tl.constexpr):
    """Compute softmax weights from exponents and the base-2 log-sum-exp of the queries, which is broadcast."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        result = result + (tl.exp2(exponent[b] - lse[b]),)
    return result


@triton.jit
def key_bounds(first, last, num_keys, S, first_key, window_size, KIND: tl.constexpr):
    """Range of a block's keys visible to queries at positions [first, last]."""
    low = tl.maximum(0, -first_key)
    high = tl.minimum(num_keys, S - first_key)
    if KIND.HAS_WINDOW:
        low = tl.maximum(low, first - first_key - window_size + 1)
        high = tl.minimum(high, last - first_key + window_size)
    if KIND.IS_CAUSAL:
        high = tl.minimum(high, last - first_key + 1)
    return low, high


@triton.jit
def query_bounds(first, last, num_queries, position0, window_size, KIND: tl.constexpr):
    """Range of a block's queries that the keys [first, last] are visible to."""
    low = 0
    high = num_queries
    if KIND.HAS_WINDOW:
        low = tl.maximum(low, first - position0 - window_size + 1)
        high = tl.minimum(high, last - position0 + window_size)
    if KIND.IS_CAUSAL:
        low = tl.maximum(low, first - position0)
    return low, high


@triton.jit
def within_documents(low, high, starts, stops, origin):
    """Restrict bounds, relative to the token `origin`, to the documents of the other side's tokens."""
    return tl.maximum(low, tl.min(starts) - origin), tl.minimum(high, tl.max(stops) - origin)


@triton.jit
def whole_tiles(low, high, count, TILE: tl.constexpr):
    """Round the start of a range of at most `count` tokens down to a multiple of TILE; never end before the start."""
    low = tl.minimum(low, count) // TILE * TILE
    return low, tl.maximum(low, high)


@triton.jit
def scramble(x):
    """Apply the finalizer of `impl/dropout.py` to words of 32 bits."""
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 13)) * SECOND
    return x ^ (x >> 16)


@triton.jit
def query_words(masks, slots, sizes, query, KIND: tl.constexpr):
    """Dropout hashes of queries, per block [queries, 16]."""
    low, high = tl.load(masks.seed).to(tl.uint32), tl.load(masks.seed + 1).to(tl.uint32)
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        plane = (slots.row + sizes.row0) * sizes.H + slots.head[b]
        word = scramble((plane.to(tl.uint32) * HEAD) ^ low)
        result = result + (scramble(word[None, :] ^ (query.to(tl.uint32) * ROW)[:, None] ^ high),)
    return result


@triton.jit
def key_words(token):
    """Dropout hashes of keys [keys]."""
    return scramble(token.to(tl.uint32) * COLUMN)


@triton.jit
def drop(tile, row_words, column_words, sizes, KIND: tl.constexpr):
    """Apply dropout to a tile; the hashes of both sides are broadcast."""
    result = ()
    for b in tl.static_range(tl.constexpr(KIND.BLOCKS)):
        kept = scramble(row_words[b] ^ column_words) >= sizes.threshold.to(tl.uint32)
        result = result + (tl.where(kept, tile[b] * sizes.keep_scale, 0.0),)
    return result
