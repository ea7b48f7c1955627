"""Shared parts of the key-side kernels: the queries that attend to a tile of 16 keys, and sums over them."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .indexing import head_of
from .layouts import COLUMNS, ROWS, row_keys


class Span(NamedTuple):
    """The blocks of 16 heads, from FIRST to LAST, that a launch computes gradients of."""

    FIRST: int
    LAST: int


@gluon.jit
def program_tile(sizes, KIND: gl.constexpr):
    """Return a program's slot set, the position of its tile's first key, and its index among the programs of the tile.

    Tiles are in ascending order, because in causal attention the first ones have the most queries.
    """
    PACK: gl.constexpr = max(1, 16 // KIND.GROUP_SLOTS)
    number, split, sets = gl.program_id(0), 0, gl.cdiv(sizes.num_instances, PACK)
    if KIND.SPLITS:
        number, split = number // sizes.splits, number % sizes.splits
    return number % sets, (gl.maximum(0, sizes.first_key) // 16 + number // sets) * 16, split


@gluon.jit
def block_range(key, sizes, KIND: gl.constexpr):
    """Return the range of blocks of a chunk whose keys contain a tile."""
    if KIND.BAND == 0:
        return 0, 1
    first = gl.cdiv(gl.maximum(0, key - sizes.first_key - sizes.num_keys + 16), KIND.BAND)
    return first, gl.minimum(gl.cdiv(sizes.num_queries, KIND.BAND), (key - sizes.first_key) // KIND.BAND + 1)


@gluon.jit
def query_range(key, set, block, split, masks, sizes, KIND: gl.constexpr):
    """Return the range of a block's queries to which a tile of keys is visible, and the first to which all of it is.

    If programs share a tile, return the range of program `split`.
    """
    begin, count = 0, sizes.num_queries
    if KIND.BAND > 0:
        begin = block * KIND.BAND
        count = gl.minimum(KIND.BAND, sizes.num_queries - begin)
    position = sizes.query0 + begin + sizes.S - sizes.T
    low, high, whole = 0, count, 0
    if KIND.IS_CAUSAL:
        low = gl.maximum(low, key - position)
        whole = key + 15 - position
    if KIND.HAS_WINDOW:
        high = gl.minimum(high, key + 15 + sizes.window_size - position)
        if not KIND.IS_CAUSAL:
            low = gl.maximum(low, key - sizes.window_size + 1 - position)
    if KIND.HAS_DOCUMENTS:
        starts, stops = key_documents(key, masks, set, sizes, KIND)
        low = gl.maximum(low, starts - position)
        high = gl.minimum(high, stops - position)
    low = gl.minimum(low, count)
    high = gl.maximum(low, high)
    if KIND.HAS_WINDOW or KIND.HAS_DOCUMENTS or KIND.MASK > 0:
        whole = high
    else:
        whole = gl.where(key + 16 > sizes.S, high, gl.minimum(gl.maximum(low, whole), high))
    if KIND.SPLITS:
        each = gl.cdiv(high - low, sizes.splits)
        low = gl.minimum(high, low + split * each)
        high = gl.minimum(high, low + each)
        whole = gl.minimum(gl.maximum(low, whole), high)
    return low, whole, high


@gluon.jit
def key_documents(key, masks, set, sizes, KIND: gl.constexpr):
    """Return the token range of the documents of a tile of keys, over all batch rows of a slot set."""
    tokens = gl.expand_dims(key + gl.arange(0, 16, ROWS), 1)
    row, _, real = head_of(gl.expand_dims(gl.arange(0, 16, COLUMNS), 0), set, 0, sizes, KIND)
    inside = (tokens < sizes.S) & real
    place = (row + sizes.row0).to(gl.int64) * sizes.S + tokens
    starts = gl.load(masks.starts + place, mask=inside, other=2**30)
    stops = gl.load(masks.stops + place, mask=inside, other=0)
    return gl.min(gl.min(starts, 1), 0), gl.max(gl.max(stops, 1), 0)


@gluon.jit
def add_key_gradients(total, x, x_sums, d, d_sums, SPEC: gl.constexpr, SPAN: gl.constexpr):
    """Add to the gradients of keys' weights: down, up and gate, of some blocks of heads.

    Args:
        total: Accumulators of each weight and block of the span.
        x: Input of the composition, per block.
        x_sums: Its sums with the down vectors.
        d: Gradient of the result, per block.
        d_sums: Its sums with the up vectors.
        SPEC: Branches of the composition.
        SPAN: Range of blocks.
    """
    COUNT: gl.constexpr = SPAN.LAST - SPAN.FIRST
    added = ()
    for r in gl.static_range(gl.constexpr(SPEC.KEY_RANK)):
        for b in gl.static_range(COUNT):
            added = added + (total[r * COUNT + b] + x[SPAN.FIRST + b] * d_sums[r],)
    for r in gl.static_range(gl.constexpr(SPEC.KEY_RANK)):
        for b in gl.static_range(COUNT):
            added = added + (total[(SPEC.KEY_RANK + r) * COUNT + b] + d[SPAN.FIRST + b] * x_sums[r],)
    if SPEC.KEY_GATE:
        for b in gl.static_range(COUNT):
            added = added + (total[2 * SPEC.KEY_RANK * COUNT + b] + x[SPAN.FIRST + b] * d[SPAN.FIRST + b],)
    return added


@gluon.jit
def store_key_gradients(
    d, pointer, set, key, split, sizes, SPEC: gl.constexpr, KIND: gl.constexpr, SPAN: gl.constexpr, SCALE: gl.constexpr
):
    """Store the gradients of a tile of keys to [B, S, COUNT, H], or add them to the stored ones.

    If programs share a tile, store them to [splits, rows, columns of the chunk, COUNT, H].
    """
    COUNT: gl.constexpr = 2 * SPEC.KEY_RANK + SPEC.KEY_GATE
    NUM_BLOCKS: gl.constexpr = SPAN.LAST - SPAN.FIRST
    token = gl.expand_dims(key + row_keys(), 1)
    for b in gl.static_range(NUM_BLOCKS):
        row, head, real = head_of(gl.expand_dims(gl.arange(0, 16, COLUMNS), 0), set, SPAN.FIRST + b, sizes, KIND)
        if KIND.SPLITS:
            row += split * (sizes.num_instances // KIND.NUM_GROUPS)
            place = row.to(gl.int64) * sizes.num_keys + token - sizes.first_key
        else:
            place = (row + sizes.row0).to(gl.int64) * sizes.S + token
        place = place * (COUNT * KIND.NUM_HEADS) + head
        inside = real & (token < sizes.S)
        for n in gl.static_range(COUNT):
            value = d[n * NUM_BLOCKS + b] * SCALE
            there = pointer + place + n * KIND.NUM_HEADS
            if KIND.ADDS:
                value += gl.load(there, mask=inside, other=0.0)
            gl.store(there, value, mask=inside)
