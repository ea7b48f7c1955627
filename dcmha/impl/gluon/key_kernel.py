"""The key-side kernel: gradients of the weights that keys bring to both compositions, one tile of 16 keys a program."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .indexing import head_of, load_statistics, load_tile, tokens_of
from .kernels import LN2, load_matrices
from .layouts import COLUMNS, ROWS, row_keys
from .masking import hide
from .mixing import compose, load_key_vectors, weighted_sums
from .programs import describe_query, key_weights, tile_pointers
from .steps import (
    add_operands,
    exponentials,
    first_terms,
    load_gradient,
    load_offsets,
    negative,
    no_sums,
    products,
    rounded,
    widened,
)


class Part(NamedTuple):
    """Which gradients a launch computes: registers hold those of 16 heads, or of 32 of one composition.

    Attributes:
        HAS_PRE: Those of the pre-composition.
        HAS_POST: Those of the post-composition.
        FIRST, LAST: Of the blocks of 16 heads from FIRST to LAST.
    """

    HAS_PRE: bool
    HAS_POST: bool
    FIRST: int
    LAST: int


@gluon.jit
def key_gradients(
    x, da, lse, delta, matrices, d_pre_key, d_post_key, pre, post, masks, sizes,
    KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Gradients of the key side of both compositions, of a tile of 16 keys: [B, S, COUNT, H].

    Where programs share a tile: the sums of each over its queries, [splits, rows, columns of the chunk, COUNT, H].
    """
    set, key = gl.program_id(1), (gl.maximum(0, sizes.first_key) // 16 + gl.program_id(0)) * 16
    v, w = key_weights(pre, set, key, sizes, PRE, KIND), key_weights(post, set, key, sizes, POST, KIND)
    if holds_vectors(KIND, PART):
        v, w = load_key_vectors(v, 0, PRE, KIND), load_key_vectors(w, 0, POST, KIND)
    d_pre, d_post = no_sums(sums_of(PART.HAS_PRE, PRE, PART)), no_sums(sums_of(PART.HAS_POST, POST, PART))
    if KIND.BAND > 0:
        first = gl.cdiv(gl.maximum(0, key - sizes.first_key - sizes.num_keys + 16), KIND.BAND)
        last = gl.minimum(gl.cdiv(sizes.num_queries, KIND.BAND), (key - sizes.first_key) // KIND.BAND + 1)
        for block in range(first, last):
            d_pre, d_post = block_gradients(
                x, da, lse, delta, matrices, v, w, d_pre, d_post, key, set, block, masks, sizes, PRE, POST, KIND, PART
            )
    else:
        d_pre, d_post = block_gradients(
            x, da, lse, delta, matrices, v, w, d_pre, d_post, key, set, 0, masks, sizes, PRE, POST, KIND, PART
        )
    if PART.HAS_PRE:
        store_key_gradients(d_pre, d_pre_key, set, key, sizes, PRE, KIND, PART, LN2)
    if PART.HAS_POST:
        store_key_gradients(d_post, d_post_key, set, key, sizes, POST, KIND, PART, 1.0)


@gluon.constexpr_function
def holds_vectors(kind, part):
    """Tell whether registers hold the vectors of the tile of keys; they are loaded for each query otherwise."""
    return kind.BLOCKS == 1 or not part.HAS_PRE


@gluon.constexpr_function
def sums_of(has, spec, part):
    """Count the accumulators of a composition's gradients."""
    return (2 * spec.KEY_RANK + spec.KEY_GATE) * (part.LAST - part.FIRST) * int(has)


@gluon.jit
def block_gradients(
    x, da, lse, delta, matrices, v, w, d_pre, d_post, key, set, block, masks, sizes,
    PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Add what the queries of a block bring."""
    low, whole, high = query_range(key, set, block, masks, sizes, KIND)
    if KIND.SPLITS:
        count = gl.cdiv(high - low, sizes.splits)
        low = gl.minimum(high, low + gl.program_id(2) * count)
        high = gl.minimum(high, low + count)
        whole = gl.minimum(gl.maximum(low, whole), high)
    for query in range(low, whole):
        program = describe_query(masks, sizes, set, block, query, KIND)
        loaded = load_query(x, da, lse, delta, matrices, key, program, PRE, POST, KIND, True)
        d_pre, d_post = key_step(loaded, key, program, v, w, d_pre, d_post, PRE, POST, KIND, PART, True)
    if KIND.BLOCKS > 1:  # registers hold one query
        for query in range(whole, high):
            program = describe_query(masks, sizes, set, block, query, KIND)
            loaded = load_query(x, da, lse, delta, matrices, key, program, PRE, POST, KIND, False)
            d_pre, d_post = key_step(loaded, key, program, v, w, d_pre, d_post, PRE, POST, KIND, PART, False)
    else:
        last = gl.maximum(high - 1, 0)
        program = describe_query(masks, sizes, set, block, gl.minimum(whole, last), KIND)
        loaded = load_query(x, da, lse, delta, matrices, key, program, PRE, POST, KIND, False)
        for query in range(whole, high):
            after = describe_query(masks, sizes, set, block, gl.minimum(query + 1, last), KIND)
            following = load_query(x, da, lse, delta, matrices, key, after, PRE, POST, KIND, False)
            program = describe_query(masks, sizes, set, block, query, KIND)
            d_pre, d_post = key_step(loaded, key, program, v, w, d_pre, d_post, PRE, POST, KIND, PART, False)
            loaded = following  # whose loads were under way
    return d_pre, d_post


class Loaded(NamedTuple):
    """What a step loads of a query.

    Attributes:
        tile: Scores, left operands of each block.
        d: Gradients of the composed weights, likewise.
        offsets: Of the query's composed scores.
        delta: Statistic of the query, [1, 16] of each block.
        pre: Matrices of the pre-composition.
        post_back: Transposed matrices of the post-composition.
    """

    tile: Any
    d: Any
    offsets: Any
    delta: Any
    pre: Any
    post_back: Any


@gluon.jit
def load_query(
    x, da, lse, delta, matrices, key, program, PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Load what a step takes of a query and a tile of keys."""
    column = key - program.first
    x, da = tile_pointers(x, program, KIND), tile_pointers(da, program, KIND)
    return Loaded(
        tile=load_tile(x, column, program.sizes.S - program.first, MASKED, KIND),
        d=load_gradient(da, column, program, KIND, MASKED),
        offsets=load_offsets(lse, program, KIND),
        delta=load_statistics(delta, program.statistics, KIND),
        pre=load_matrices(matrices, program, 0, PRE, KIND),
        post_back=load_matrices(matrices, program, 1, POST, KIND),
    )


@gluon.jit
def query_range(key, set, block, masks, sizes, KIND: gl.constexpr):
    """Bound the queries of a block that see a tile of keys, and return from which on they see all of it."""
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
        high = gl.minimum(high, key + 15 + sizes.window - position)
        if not KIND.IS_CAUSAL:
            low = gl.maximum(low, key - sizes.window + 1 - position)
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
    return low, whole, high


@gluon.jit
def key_documents(key, masks, set, sizes, KIND: gl.constexpr):
    """Bound the tokens of the documents of a tile of keys, in all rows of the batch of a set of slots."""
    tokens = gl.expand_dims(key + gl.arange(0, 16, ROWS), 1)
    row, _, real = head_of(gl.expand_dims(gl.arange(0, 16, COLUMNS), 0), set, 0, sizes, KIND)
    inside = (tokens < sizes.S) & real
    place = (row + sizes.row0).to(gl.int64) * sizes.S + tokens
    starts = gl.load(masks.starts + place, mask=inside, other=2**30)
    stops = gl.load(masks.stops + place, mask=inside, other=0)
    return gl.min(gl.min(starts, 1), 0), gl.max(gl.max(stops, 1), 0)


@gluon.jit
def key_step(
    loaded, key, program, v, w, d_pre, d_post, PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr,
    PART: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add what a query brings to the gradients of a tile of keys."""
    if not holds_vectors(KIND, PART):
        v, w = load_key_vectors(v, 0, PRE, KIND), load_key_vectors(w, 0, POST, KIND)
    ones, identity, tile, d = program.ones, program.identity, loaded.tile, loaded.d
    x_wide, d_wide = widened(tile, program, KIND), widened(d, program, KIND)
    x_sums = weighted_sums(tile, v, ones, PRE, KIND, 0)
    y = first_terms(loaded.offsets, key - program.first, program, KIND)
    y = compose(y, tile, x_wide, loaded.pre, v, x_sums, identity, PRE, KIND, 0)
    y = add_operands(y, tile, program, KIND)
    if MASKED:
        y = hide(y, tokens_of(program, key - program.first), program, KIND)
    p = exponentials(y, KIND)
    d_sums = weighted_sums(d, w, ones, POST, KIND, 1)
    if PART.HAS_POST:
        p_sums = weighted_sums(rounded(p, KIND), w, ones, POST, KIND, 0)
        d_post = add_key_gradients(d_post, p, p_sums, d_wide, d_sums, POST, PART)
    if PART.HAS_PRE:
        d_p = negative(loaded.delta, KIND)
        d_p = compose(d_p, d, d_wide, loaded.post_back, w, d_sums, identity, POST, KIND, 1)
        d_y = products(p, add_operands(d_p, d, program, KIND), KIND)
        y_sums = weighted_sums(rounded(d_y, KIND), v, ones, PRE, KIND, 1)
        d_pre = add_key_gradients(d_pre, x_wide, x_sums, d_y, y_sums, PRE, PART)
    return d_pre, d_post


@gluon.jit
def add_key_gradients(total, x, x_sums, d, d_sums, SPEC: gl.constexpr, PART: gl.constexpr):
    """Add to the gradients of keys' weights: down, up and gate, of some blocks of heads.

    Args:
        total: Accumulators of each weight and block.
        x: What is composed.
        x_sums: Its sums with the down vectors.
        d: Gradient of the result.
        d_sums: Its sums with the up vectors.
        SPEC: Branches of the composition.
        PART: Which blocks.
    """
    COUNT: gl.constexpr = PART.LAST - PART.FIRST
    added = ()
    for r in gl.static_range(gl.constexpr(SPEC.KEY_RANK)):
        for b in gl.static_range(COUNT):
            added = added + (total[r * COUNT + b] + x[PART.FIRST + b] * d_sums[r],)
    for r in gl.static_range(gl.constexpr(SPEC.KEY_RANK)):
        for b in gl.static_range(COUNT):
            added = added + (total[(SPEC.KEY_RANK + r) * COUNT + b] + d[PART.FIRST + b] * x_sums[r],)
    if SPEC.KEY_GATE:
        for b in gl.static_range(COUNT):
            added = added + (total[2 * SPEC.KEY_RANK * COUNT + b] + x[PART.FIRST + b] * d[PART.FIRST + b],)
    return added


@gluon.jit
def store_key_gradients(
    d, pointer, set, key, sizes, SPEC: gl.constexpr, KIND: gl.constexpr, PART: gl.constexpr, SCALE: gl.constexpr
):
    """Store the gradients of a tile of keys to [B, S, COUNT, H], or add them to what is there."""
    COUNT: gl.constexpr = 2 * SPEC.KEY_RANK + SPEC.KEY_GATE
    NUM_BLOCKS: gl.constexpr = PART.LAST - PART.FIRST
    token = gl.expand_dims(key + row_keys(), 1)
    for b in gl.static_range(NUM_BLOCKS):
        row, head, real = head_of(gl.expand_dims(gl.arange(0, 16, COLUMNS), 0), set, PART.FIRST + b, sizes, KIND)
        if KIND.SPLITS:
            row += gl.program_id(2) * (sizes.num_instances // KIND.NUM_GROUPS)
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
