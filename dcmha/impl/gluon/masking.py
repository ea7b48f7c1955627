"""Visibility of keys, masks and dropout on tiles of 16 keys x 16 heads."""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .. import dropout
from .layouts import ACCUMULATOR, LEFT

LOG2E = gl.constexpr(1.4426950408889634)
HIDDEN = gl.constexpr(float("-inf"))  # score of a hidden key; its weight is 0
EMPTY = gl.constexpr(1e30)  # log-sum-exp of a query without visible keys, in units of log 2: its weights are 0
FIRST, SECOND = gl.constexpr(dropout.FIRST), gl.constexpr(dropout.SECOND)
HEAD, ROW, COLUMN = gl.constexpr(dropout.HEAD), gl.constexpr(dropout.ROW), gl.constexpr(dropout.COLUMN)


class Masks(NamedTuple):
    """Tensors and numbers for masking and dropout; None if a call has none.

    Attributes:
        pairs: Mask with any strides over [B, H, T, S]: bytes, where 0 hides, or floats that are added.
        row, head, query, key: Its strides, 0 along broadcast axes.
        starts: First token of each token's document [B, S], int32.
        stops: End of the document, exclusive, likewise.
        seed: Dropout seed [2], int64.
        threshold: A composed weight is dropped if its 32-bit hash is below; as a signed integer.
        keep_scale: Factor on weights that are not dropped.
        shifts: Value that is subtracted from a floating mask before it is added, per query and slot, float32 [sets, T,
            16 BLOCKS]: the maximum visible to the query, or a value near it. Softmax weights are invariant to it, and
            sums of scores with large mask values would lose precision.
    """

    pairs: Any
    row: Any
    head: Any
    query: Any
    key: Any
    starts: Any
    stops: Any
    seed: Any
    threshold: Any
    keep_scale: Any
    shifts: Any = None

    @property
    def kind(self) -> int:
        """0 without a mask, 1 for a boolean mask, 2 for a floating one."""
        return 0 if self.pairs is None else 1 if self.pairs.dtype == torch.uint8 else 2


def masks_of(
    mask: Tensor | None, starts: Tensor | None, stops: Tensor | None, seed: Tensor | None, dropout_p: float
) -> Masks:
    """Create the `Masks` of a call.

    Args:
        mask: Boolean or floating, with four axes, broadcastable to [B, H, T, S]; or None.
        starts, stops: Bounds of documents; or None.
        seed: Dropout seed; None for no dropout.
        dropout_p: Dropout probability.
    """
    strides = (None,) * 4
    if mask is not None:
        strides = tuple(0 if n == 1 else stride for n, stride in zip(mask.shape, mask.stride(), strict=True))
        mask = mask.view(torch.uint8) if mask.dtype == torch.bool else mask
    dropping = (None, None, None)
    if seed is not None:
        threshold = dropout.threshold_of(dropout_p)
        signed = threshold - dropout.WORD if threshold >= dropout.WORD // 2 else threshold  # same 32 bits
        dropping = (seed, signed, 1.0 / (1.0 - dropout_p))
    return Masks(mask, *strides, starts, stops, *dropping)


@gluon.jit
def present(masks, KIND: gl.constexpr):
    """Replace None, which functions cannot return in Triton 3.6, by ()."""
    pairs, row, head, query, key, shifts = (), (), (), (), (), ()
    starts, stops, seed, threshold, keep_scale = (), (), (), (), ()
    if KIND.MASK > 0:
        pairs, row, head, query, key = masks.pairs, masks.row, masks.head, masks.query, masks.key
    if KIND.MASK == 2:
        shifts = masks.shifts
    if KIND.HAS_DOCUMENTS:
        starts, stops = masks.starts, masks.stops
    if KIND.HAS_DROPOUT:
        seed, threshold, keep_scale = masks.seed, masks.threshold, masks.keep_scale
    return Masks(
        pairs=pairs,
        row=row,
        head=head,
        query=query,
        key=key,
        starts=starts,
        stops=stops,
        seed=seed,
        threshold=threshold,
        keep_scale=keep_scale,
        shifts=shifts,
    )


@gluon.jit
def visible_range(position, first, limit, starts, stops, sizes, KIND: gl.constexpr):
    """Return the range of workspace columns visible to a query; its start is a multiple of 16.

    Args:
        position: Position of the query among the keys.
        first: Position of the first column.
        limit: Number of columns.
        starts, stops: Document bounds of the query over all batch rows of a tile.
        sizes: Sizes of the chunk.
        KIND: Configuration of the call.
    """
    low = gl.maximum(0, -first)
    high = gl.minimum(limit, sizes.S - first)
    if KIND.IS_CAUSAL:
        high = gl.minimum(high, position - first + 1)
    if KIND.HAS_WINDOW:
        low = gl.maximum(low, position - first - sizes.window_size + 1)
        if not KIND.IS_CAUSAL:
            high = gl.minimum(high, position - first + sizes.window_size)
    if KIND.HAS_DOCUMENTS:
        low = gl.maximum(low, starts - first)
        high = gl.minimum(high, stops - first)
    low = gl.minimum(low, limit - 16) // 16 * 16  # an existing tile, even if no key is visible
    return low, gl.maximum(low, high)


@gluon.jit
def visible_keys(tokens, program, KIND: gl.constexpr):
    """Visibility of keys by position and document: [16, 1], or per head [16, 16]."""
    position = program.position
    visible = (tokens >= 0) & (tokens < program.sizes.S)
    if KIND.IS_CAUSAL:
        visible = visible & (tokens <= position)
    if KIND.HAS_WINDOW:
        visible = visible & (tokens > position - program.sizes.window_size)
        if not KIND.IS_CAUSAL:
            visible = visible & (tokens < position + program.sizes.window_size)
    if KIND.HAS_DOCUMENTS:
        visible = visible & (tokens >= program.document_ids[0]) & (tokens < program.document_ids[1])
    return visible


@gluon.jit
def biases(tokens, program, KIND: gl.constexpr):
    """Load a floating mask: accumulators [16 keys, 16 heads] per block, `HIDDEN` for hidden keys.

    Args:
        tokens: Positions of the keys [16, 1].
        program: The query.
        KIND: Configuration of the call.
    """
    visible, result = visible_keys(tokens, program, KIND), ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        bias = load_mask(tokens, visible, b, program).to(gl.float32)
        result = result + (gl.where(visible, bias, HIDDEN),)
    return result


@gluon.jit
def load_mask(tokens, visible, BLOCK: gl.constexpr, program):
    """Load the mask of a block of heads for visible keys; 0 elsewhere."""
    place, real = program.places[BLOCK]
    return gl.load(program.masks.pairs + place + tokens.to(gl.int64) * program.masks.key, mask=visible & real, other=0)


@gluon.jit
def visible_pairs(tokens, bias, program, KIND: gl.constexpr):
    """Visibility of the keys of a tile per head: [16, 1] or [16, 16] per block; `bias` is the result of `biases`."""
    result = ()
    if KIND.MASK != 2:
        visible = visible_keys(tokens, program, KIND)
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        if KIND.MASK == 2:
            result = result + (bias[b] != HIDDEN,)  # keeps NaN
        elif KIND.MASK == 1:
            result = result + (visible & (load_mask(tokens, visible, b, program) != 0),)
        else:
            result = result + (visible,)
    return result


@gluon.jit
def hide(scores, visible, KIND: gl.constexpr):
    """Set the scores of hidden keys to `HIDDEN`."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.where(visible[b], scores[b], HIDDEN),)
    return result


@gluon.jit
def zero_hidden(tile, visible, program, KIND: gl.constexpr):
    """Set left operands to 0 for hidden keys: they may be NaN, which products would spread to other rows of a tile.

    Not used if the mask differs between heads, because values hidden from one head are composed into others.
    """
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        x, kept = gl.convert_layout(tile[b], ACCUMULATOR, assert_trivial=True), visible[b]
        if KIND.MASK > 0:
            kept = kept | (program.masks.head != 0)
        x = gl.where(kept, x, gl.zeros([16, 16], KIND.DTYPE, ACCUMULATOR))
        result = result + (gl.convert_layout(x, LEFT, assert_trivial=True),)
    return result


@gluon.jit
def scramble(x):
    """Apply the finalizer of `impl/dropout.py` to words of 32 bits."""
    x = (x ^ (x >> 16)) * FIRST
    x = (x ^ (x >> 13)) * SECOND
    return x ^ (x >> 16)


@gluon.jit
def query_words(masks, plane, query):
    """Dropout hashes of planes (batch row and head) [1, 16] at a query."""
    low, high = gl.load(masks.seed).to(gl.uint32), gl.load(masks.seed + 1).to(gl.uint32)
    word = scramble((plane.to(gl.uint32) * HEAD) ^ low)
    return scramble(word ^ (query.to(gl.uint32) * ROW) ^ high)


@gluon.jit
def drop(x, words, tokens, masks, KIND: gl.constexpr):
    """Apply dropout to accumulators [16 keys, 16 heads] per block."""
    key_words = scramble(tokens.to(gl.uint32) * COLUMN)
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        kept = scramble(words[b] ^ key_words) >= masks.threshold.to(gl.uint32)
        result = result + (gl.where(kept, x[b] * masks.keep_scale, 0.0),)
    return result
