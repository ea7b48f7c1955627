"""The query-side kernels, which mix heads on a chunk of scores, one warp and one query a program.

The workspace `x` holds scores in units of log 2, [rows, H / shared, blocks, shared, queries, keys]; `da`, of the same
shape, the gradient of the composed weights A. Library products write and read them. `lse` and `delta`,
[sets, T, 16 BLOCKS], are the base-2 log-sum-exp and sum_j P dP of each query and head, with P the softmax weights.

    row_statistics      x -> lse
    composed_weights    x -> A
    post_gradients      x, da -> delta, gradients of the query's post-composition; the query's matrices
    key_gradients       x, da -> gradients of the key side of both compositions (`key_kernel.py`)
    pre_gradients       x, da -> A, gradient of the scores, gradients of the query's pre-composition
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .indexing import head_of, load_statistics, store_statistics, store_zeros
from .layouts import ACCUMULATOR, COLUMNS, PACKED, RIGHT, ROWS
from .masking import EMPTY, HIDDEN
from .mixing import store_query_gradients
from .programs import composition_of, query_program, query_weights, tile_pointers, unmasked_end
from .steps import no_offsets, no_sums, post_step, pre_step, visible_scores, weights_step

LARGE = gl.constexpr(2.0**100)  # sums of exponentials outside of [1 / LARGE, LARGE] are computed again
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def row_statistics(x, lse, pre, masks, sizes, KIND: gl.constexpr, PRE: gl.constexpr):
    """The base-2 log-sum-exp of the composed scores of a query.

    Scores are taken relative to the largest of the first tile. Where this leaves the range of float32, the largest of
    all is found, and the sum computed again.
    """
    program = query_program(masks, sizes, KIND)
    pre = composition_of(pre, program, PRE, KIND, True, False)
    x, end = tile_pointers(x, program, KIND), unmasked_end(program, KIND)
    _, y = visible_scores(x, program.low, 0, program, no_offsets(KIND), pre, PRE, KIND, True)
    offsets, total = finite_maxima(y, KIND), no_sums(KIND.BLOCKS)
    for start in range(program.low, end, 32):
        for half in gl.static_range(2):
            _, y = visible_scores(x, start, half * 16, program, offsets, pre, PRE, KIND, False)
            total = add_exponentials(total, y, KIND)
    for start in range(end, program.high, 16):
        _, y = visible_scores(x, start, 0, program, offsets, pre, PRE, KIND, True)
        total = add_exponentials(total, y, KIND)
    result = log_sums(x, offsets, total, program, pre, PRE, KIND)
    store_statistics(lse, program.statistics, result, KIND)


@gluon.jit
def log_sums(x, offsets, total, program, pre, PRE: gl.constexpr, KIND: gl.constexpr):
    """The base-2 log-sum-exp of a query, [1, 16] of each block, from sums of exponentials relative to offsets."""
    sums = sum_keys(total, KIND)
    bad = gl.zeros([1, 16], gl.int32, ACCUMULATOR)
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        bad += gl.where((sums[b] > 1.0 / LARGE) & (sums[b] < LARGE), 0, 1)
    if gl.max(gl.max(bad, 1), 0) > 0:
        offsets, sums = sums_of_any_range(x, program, pre, PRE, KIND)
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.where(sums[b] > 0.0, offsets[b] + gl.log2(sums[b]), EMPTY),)
    return result


@gluon.jit
def sums_of_any_range(x, program, pre, PRE: gl.constexpr, KIND: gl.constexpr):
    """Find the largest composed scores of a query, and sum the exponentials relative to them, [1, 16] of each block."""
    largest, nothing = all_hidden(KIND), no_offsets(KIND)
    for start in range(program.low, program.high, 16):
        _, y = visible_scores(x, start, 0, program, nothing, pre, PRE, KIND, True)
        larger = ()
        for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
            larger = larger + (gl.maximum(largest[b], y[b]),)
        largest = larger
    offsets, total = finite_maxima(largest, KIND), no_sums(KIND.BLOCKS)
    for start in range(program.low, program.high, 16):
        _, y = visible_scores(x, start, 0, program, offsets, pre, PRE, KIND, True)
        total = add_exponentials(total, y, KIND)
    return offsets, sum_keys(total, KIND)


@gluon.jit
def all_hidden(KIND: gl.constexpr):
    """Return the scores of hidden keys."""
    result = ()
    for _ in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.full([16, 16], HIDDEN, gl.float32, ACCUMULATOR),)
    return result


@gluon.jit
def finite_maxima(y, KIND: gl.constexpr):
    """Take the maximum over the keys, [1, 16] of each block; 0 where all are hidden."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        largest = gl.expand_dims(gl.max(y[b], 0), 0)
        result = result + (gl.where(largest > HIDDEN / 2, largest, 0.0),)
    return result


@gluon.jit
def add_exponentials(total, y, KIND: gl.constexpr):
    """Add 2^y to sums."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (total[b] + gl.exp2(y[b]),)
    return result


@gluon.jit
def sum_keys(x, KIND: gl.constexpr):
    """Sum over the keys: [1, 16] of each block."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.expand_dims(gl.sum(x[b], 0), 0),)
    return result


@gluon.jit
def composed_weights(x, lse, pre, post, masks, sizes, KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr):
    """Scores of a query to composed weights, in place."""
    program = query_program(masks, sizes, KIND)
    pre = composition_of(pre, program, PRE, KIND, True, False)
    post = composition_of(post, program, POST, KIND, True, False)
    lse = load_statistics(lse, program.statistics, KIND)
    at, end = tile_pointers(x, program, KIND), unmasked_end(program, KIND)
    for start in range(program.low, end, 32):
        for half in gl.static_range(2):
            weights_step(at, at, start, half * 16, program, lse, pre, post, PRE, POST, KIND, False)
    for start in range(end, program.high, 16):
        weights_step(at, at, start, 0, program, lse, pre, post, PRE, POST, KIND, True)
    store_hidden(x, program, program.low, program.high, KIND)


@gluon.jit
def store_hidden(workspace, program, low, high, KIND: gl.constexpr):
    """Store zeros to the columns of a query that steps from `low` to `high` do not cover."""
    block, query, sizes = 0, program.query, program.sizes
    if KIND.BAND > 0:
        block, query = query // KIND.BAND, query % KIND.BAND
    if KIND.HAS_WINDOW or KIND.HAS_DOCUMENTS:
        store_zeros(workspace, program.set, block, query, 0, low, sizes, KIND)
    covered = low + (high - low + 15) // 16 * 16
    store_zeros(workspace, program.set, block, query, covered, sizes.num_keys, sizes, KIND)


@gluon.jit
def post_gradients(
    x, da, lse, delta, matrices, d_query, d_base, pre, post, masks, sizes,
    KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr,
):  # fmt: skip
    """The sums delta = sum_j P dP of a query, and gradients of its post-composition.

    Leaves its matrices, of the pre-composition and of the transposed post-composition, to `key_gradients`.
    """
    program = query_program(masks, sizes, KIND)
    weights = query_weights(post, program, POST)
    pre = composition_of(pre, program, PRE, KIND, True, False)
    post = composition_of(post, program, POST, KIND, False, True)
    if matrices is not None:
        store_matrices(matrices, program, pre.matrices, 0, PRE, KIND)
        store_matrices(matrices, program, post.back, 1, POST, KIND)
    lse = load_statistics(lse, program.statistics, KIND)
    total, d_post = no_sums(KIND.BLOCKS), no_matrix_gradients(POST, KIND)
    x, da, end = tile_pointers(x, program, KIND), tile_pointers(da, program, KIND), unmasked_end(program, KIND)
    for start in range(program.low, end, 32):
        for half in gl.static_range(2):
            total, d_post = post_step(
                x, da, start, half * 16, program, lse, pre, post, total, d_post, PRE, POST, KIND, False
            )
    for start in range(end, program.high, 16):
        total, d_post = post_step(x, da, start, 0, program, lse, pre, post, total, d_post, PRE, POST, KIND, True)
    store_statistics(delta, program.statistics, sum_keys(total, KIND), KIND)
    store_matrix_gradients(d_post, d_query, d_base, weights, program, POST, KIND, 1.0)


@gluon.jit
def pre_gradients(
    x, da, dy, lse, delta, d_query, d_base, pre, post, masks, sizes,
    KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr,
):  # fmt: skip
    """Gradients of a query's pre-composition; in place x -> A and da -> gradient of the scores.

    The gradient of the composed scores goes to a workspace `dy` where the mask takes one.
    """
    program = query_program(masks, sizes, KIND)
    weights = query_weights(pre, program, PRE)
    pre = composition_of(pre, program, PRE, KIND, True, True)
    post = composition_of(post, program, POST, KIND, True, True)
    lse, delta = load_statistics(lse, program.statistics, KIND), load_statistics(delta, program.statistics, KIND)
    d_pre = no_matrix_gradients(PRE, KIND)
    x_at, da_at, dy_at = tile_pointers(x, program, KIND), tile_pointers(da, program, KIND), ()
    if KIND.MASK_GRADIENT:
        dy_at = tile_pointers(dy, program, KIND)
    end = unmasked_end(program, KIND)
    for start in range(program.low, end, 32):
        for half in gl.static_range(2):
            d_pre = pre_step(
                x_at, da_at, dy_at, start, half * 16, program, lse, delta, pre, post, d_pre, PRE, POST, KIND, False
            )
    for start in range(end, program.high, 16):
        d_pre = pre_step(x_at, da_at, dy_at, start, 0, program, lse, delta, pre, post, d_pre, PRE, POST, KIND, True)
    store_hidden(x, program, program.low, program.high, KIND)
    store_hidden(da, program, program.low, program.high, KIND)
    if KIND.MASK_GRADIENT:
        store_hidden(dy, program, program.low, program.high, KIND)
    store_matrix_gradients(d_pre, d_query, d_base, weights, program, PRE, KIND, LN2)


@gluon.jit
def no_matrix_gradients(SPEC: gl.constexpr, KIND: gl.constexpr):
    """Begin the gradients of a query's matrices."""
    if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
        return no_sums(KIND.BLOCKS * KIND.BLOCKS)
    else:
        return ()


class Slots(NamedTuple):
    """Offsets of the slots' heads in gradients [B, tokens, COUNT, H], and which exist, of each block."""

    row_offsets: Any
    row_real: Any
    column_offsets: Any
    column_real: Any


@gluon.jit
def gradient_slots(program, COUNT: gl.constexpr, KIND: gl.constexpr):
    """Find the places of a query's heads in gradients [B, T, COUNT, H]: `Slots`."""
    rows, row_real, columns, column_real = (), (), (), ()
    sizes = program.sizes
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        row, head, real = head_of(gl.arange(0, 16, ROWS), program.set, b, sizes, KIND)
        place = ((row + sizes.row0).to(gl.int64) * sizes.T + program.token) * (COUNT * KIND.NUM_HEADS) + head
        rows, row_real = rows + (place,), row_real + (real,)
        row, head, real = head_of(gl.arange(0, 16, COLUMNS), program.set, b, sizes, KIND)
        place = ((row + sizes.row0).to(gl.int64) * sizes.T + program.token) * (COUNT * KIND.NUM_HEADS) + head
        columns, column_real = columns + (place,), column_real + (real,)
    return Slots(row_offsets=rows, row_real=row_real, column_offsets=columns, column_real=column_real)


@gluon.jit
def store_matrix_gradients(
    d, d_query, d_base, weights, program, SPEC: gl.constexpr, KIND: gl.constexpr, SCALE: gl.constexpr
):
    """Store the gradients of a query's weights, and those of its matrices if a static base is part of them."""
    COUNT: gl.constexpr = 2 * SPEC.QUERY_RANK + SPEC.QUERY_GATE
    PAIRS: gl.constexpr = KIND.BLOCKS * KIND.BLOCKS
    if COUNT > 0:
        store_query_gradients(d, d_query, gradient_slots(program, COUNT, KIND), weights, SPEC, KIND, SCALE)
    if SPEC.BASE:
        row, column = gl.expand_dims(gl.arange(0, 16, ROWS), 1), gl.expand_dims(gl.arange(0, 16, COLUMNS), 0)
        place = d_base + query_number(program).to(gl.int64) * (256 * PAIRS)
        for n in gl.static_range(PAIRS):
            gl.store(place + n * 256 + row * 16 + column, d[n] * SCALE)


@gluon.jit
def query_number(program):
    """Number the query of a set among those of all sets of the chunk."""
    return program.set * program.sizes.num_queries + program.query


@gluon.jit
def store_matrices(matrices, program, right, PLACE: gl.constexpr, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Store right operands of each pair of blocks in the order of `load_matrices`: 16 bytes per lane of each."""
    PAIRS: gl.constexpr = KIND.BLOCKS * KIND.BLOCKS
    if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
        place = matrices + (query_number(program).to(gl.int64) * 2 + PLACE) * (PAIRS * 256)
        for n in gl.static_range(PAIRS):
            parts = gl.permute(gl.reshape(right[n], [2, 4, 2, 2, 8]), [4, 1, 3, 0, 2])
            flat = gl.convert_layout(gl.reshape(parts, [256]), PACKED, assert_trivial=True)
            gl.store(place + n * 256 + gl.arange(0, 256, PACKED), flat)


@gluon.jit
def load_matrices(matrices, program, PLACE: gl.constexpr, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Load what `post_gradients` left: of the pre-composition (0), or of the post-composition, transposed (1)."""
    PAIRS: gl.constexpr = KIND.BLOCKS * KIND.BLOCKS
    result = ()
    if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
        place = matrices + (query_number(program).to(gl.int64) * 2 + PLACE) * (PAIRS * 256)
        for n in gl.static_range(PAIRS):
            raw = gl.load(place + n * 256 + gl.arange(0, 256, PACKED))
            parts = gl.permute(gl.reshape(raw, [8, 4, 2, 2, 2]), [3, 1, 4, 2, 0])
            result = result + (gl.convert_layout(gl.reshape(parts, [16, 16]), RIGHT, assert_trivial=True),)
    return result
