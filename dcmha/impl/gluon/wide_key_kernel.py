"""The key-side kernel for groups of more than 16 heads: gradients of the key side of one composition.

The recomputation of `key_gradients` would not fit into registers. Instead, query-side kernels store the input of the
composition and the gradient of its output: softmax weights and gradients of composed weights, or scores and gradients
of composed scores.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .indexing import load_tile
from .key_tiles import add_key_gradients, block_range, program_tile, query_range, store_key_gradients
from .mixing import load_key_vectors, weighted_sums
from .programs import describe_query, key_weights, tile_pointers
from .steps import load_gradient, no_sums, widened


class Part(NamedTuple):
    """The part of the gradients that a launch computes.

    Attributes:
        FIRST, LAST: Range of blocks of 16 heads.
        IS_POST: Whether it is the post-composition, which has dropout.
        SCALE: Factor on the gradients.
    """

    FIRST: int
    LAST: int
    IS_POST: bool
    SCALE: float


@gluon.jit
def wide_key_gradients(x, d, d_key, weights, masks, sizes, KIND: gl.constexpr, SPEC: gl.constexpr, PART: gl.constexpr):
    """Gradients of the key side of a composition, of a tile of 16 keys: [B, S, COUNT, H].

    Args:
        x: Workspace with the input of the composition.
        d: Workspace with the gradient of its output.
        d_key: Destination of the gradients.
        weights: `Packed` weights of the composition.
        masks: `Masks` of the call.
        sizes: Sizes of the chunk.
        KIND: Configuration of the call.
        SPEC: Branches of the composition.
        PART: The part to compute.
    """
    set, key, split = program_tile(sizes, KIND)
    vectors = load_key_vectors(key_weights(weights, set, key, sizes, SPEC, KIND), 0, SPEC, KIND)
    total = no_sums((2 * SPEC.KEY_RANK + SPEC.KEY_GATE) * (PART.LAST - PART.FIRST))
    first, last = block_range(key, sizes, KIND)
    for block in range(first, last):
        total = add_block(x, d, vectors, total, key, set, block, split, masks, sizes, SPEC, KIND, PART)
    store_key_gradients(total, d_key, set, key, split, sizes, SPEC, KIND, PART, PART.SCALE)


@gluon.jit
def add_block(
    x, d, vectors, total, key, set, block, split, masks, sizes,
    SPEC: gl.constexpr, KIND: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Add the contributions of the queries of a block; weights and gradients of hidden keys are 0."""
    low, _, high = query_range(key, set, block, split, masks, sizes, KIND)
    last = gl.maximum(high - 1, 0)
    x_tile, d_tile = load_pair(x, d, key, gl.minimum(low, last), set, block, masks, sizes, KIND, PART)
    for query in range(low, high):
        x_next, d_next = load_pair(x, d, key, gl.minimum(query + 1, last), set, block, masks, sizes, KIND, PART)
        program = describe_query(masks, sizes, set, block, query, KIND)
        x_sums = weighted_sums(x_tile, vectors, program.ones, SPEC, KIND, 0)
        d_sums = weighted_sums(d_tile, vectors, program.ones, SPEC, KIND, 1)
        x_wide, d_wide = widened(x_tile, program, KIND), widened(d_tile, program, KIND)
        total = add_key_gradients(total, x_wide, x_sums, d_wide, d_sums, SPEC, PART)
        x_tile, d_tile = x_next, d_next  # loaded in advance
    return total


@gluon.jit
def load_pair(x, d, key, query, set, block, masks, sizes, KIND: gl.constexpr, PART: gl.constexpr):
    """Load a query's tile of the composition's input and of the gradient of its output."""
    program = describe_query(masks, sizes, set, block, query, KIND)
    column = key - program.first
    x, d = tile_pointers(x, program, KIND), tile_pointers(d, program, KIND)
    if PART.IS_POST:
        return load_tile(x, column, 0, False, KIND), load_gradient(d, column, program, KIND, False)
    else:
        return load_tile(x, column, 0, False, KIND), load_tile(d, column, 0, False, KIND)
