"""The key-side kernel for groups of up to 16 heads: gradients of the key side of both compositions.

A program processes a tile of 16 keys.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .indexing import load_statistics, load_tile
from .kernels import LN2, load_matrices
from .key_tiles import Span, add_key_gradients, block_range, program_tile, query_range, store_key_gradients
from .masking import hide
from .mixing import compose, load_key_vectors, weighted_sums
from .programs import describe_query, key_weights, tile_pointers
from .steps import (
    add_operands,
    apply_mask,
    exponentials,
    initial_accumulators,
    load_gradient,
    load_offsets,
    negative,
    no_sums,
    products,
    rounded,
    widened,
)


class Part(NamedTuple):
    """Which gradients a launch computes: those of the pre-composition, of the post-composition."""

    HAS_PRE: bool
    HAS_POST: bool


ALL = gl.constexpr(Span(0, 1))


@gluon.jit
def key_gradients(
    x, da, lse, delta, matrices, d_pre_key, d_post_key, pre, post, masks, sizes,
    KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Gradients of the key side of both compositions, of a tile of 16 keys and up to 16 heads: [B, S, COUNT, H]."""
    set, key, split = program_tile(sizes, KIND)
    v = load_key_vectors(key_weights(pre, set, key, sizes, PRE, KIND), 0, PRE, KIND)
    w = load_key_vectors(key_weights(post, set, key, sizes, POST, KIND), 0, POST, KIND)
    d_pre, d_post = no_sums(sums_of(PART.HAS_PRE, PRE)), no_sums(sums_of(PART.HAS_POST, POST))
    first, last = block_range(key, sizes, KIND)
    for block in range(first, last):
        d_pre, d_post = block_gradients(
            x, da, lse, delta, matrices, v, w, d_pre, d_post, key, set, block, split, masks, sizes,
            PRE, POST, KIND, PART,
        )  # fmt: skip
    if PART.HAS_PRE:
        store_key_gradients(d_pre, d_pre_key, set, key, split, sizes, PRE, KIND, ALL, LN2)
    if PART.HAS_POST:
        store_key_gradients(d_post, d_post_key, set, key, split, sizes, POST, KIND, ALL, 1.0)


@gluon.constexpr_function
def sums_of(has, spec):
    """Number of accumulators of a composition's gradients."""
    return (2 * spec.KEY_RANK + spec.KEY_GATE) * int(has)


@gluon.jit
def block_gradients(
    x, da, lse, delta, matrices, v, w, d_pre, d_post, key, set, block, split, masks, sizes,
    PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Add the contributions of the queries of a block."""
    low, whole, high = query_range(key, set, block, split, masks, sizes, KIND)
    for query in range(low, whole):
        program = describe_query(masks, sizes, set, block, query, KIND)
        loaded = load_query(x, da, lse, delta, matrices, key, program, PRE, POST, KIND, True)
        d_pre, d_post = key_step(loaded, key, program, v, w, d_pre, d_post, PRE, POST, KIND, PART, True)
    last = gl.maximum(high - 1, 0)
    program = describe_query(masks, sizes, set, block, gl.minimum(whole, last), KIND)
    loaded = load_query(x, da, lse, delta, matrices, key, program, PRE, POST, KIND, False)
    for query in range(whole, high):
        after = describe_query(masks, sizes, set, block, gl.minimum(query + 1, last), KIND)
        following = load_query(x, da, lse, delta, matrices, key, after, PRE, POST, KIND, False)
        program = describe_query(masks, sizes, set, block, query, KIND)
        d_pre, d_post = key_step(loaded, key, program, v, w, d_pre, d_post, PRE, POST, KIND, PART, False)
        loaded = following  # loaded in advance
    return d_pre, d_post


class Loaded(NamedTuple):
    """Values of a query that a step loads.

    Attributes:
        tile: Scores, left operands of each block.
        d: Gradients of the composed weights, likewise.
        offsets: Offsets of the query's composed scores.
        delta: Statistic of the query, [1, 16] per block.
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
    """Load the values of a query and a tile of keys."""
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
def key_step(
    loaded, key, program, v, w, d_pre, d_post, PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr,
    PART: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of a query to the gradients of a tile of keys."""
    ones, identity, d = program.ones, program.identity, loaded.d
    tile, bias, visible = apply_mask(loaded.tile, key - program.first, program, KIND, MASKED)
    x_wide, d_wide = widened(tile, program, KIND), widened(d, program, KIND)
    x_sums = weighted_sums(tile, v, ones, PRE, KIND, 0)
    y = initial_accumulators(loaded.offsets, bias, KIND)
    y = compose(y, tile, x_wide, loaded.pre, v, x_sums, identity, PRE, KIND, 0)
    y = add_operands(y, tile, program, KIND)
    if MASKED:
        y = hide(y, visible, KIND)
    p = exponentials(y, KIND)
    d_sums = weighted_sums(d, w, ones, POST, KIND, 1)
    if PART.HAS_POST:
        p_sums = weighted_sums(rounded(p, KIND), w, ones, POST, KIND, 0)
        d_post = add_key_gradients(d_post, p, p_sums, d_wide, d_sums, POST, ALL)
    if PART.HAS_PRE:
        d_p = negative(loaded.delta, KIND)
        d_p = compose(d_p, d, d_wide, loaded.post_back, w, d_sums, identity, POST, KIND, 1)
        d_y = products(p, add_operands(d_p, d, program, KIND), KIND)
        y_sums = weighted_sums(rounded(d_y, KIND), v, ones, PRE, KIND, 1)
        d_pre = add_key_gradients(d_pre, x_wide, x_sums, d_y, y_sums, PRE, ALL)
    return d_pre, d_post
