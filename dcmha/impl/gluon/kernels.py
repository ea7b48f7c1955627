"""The query-side kernels, which mix heads on a chunk of scores: one warp per program.

The workspace `x` holds scores in units of log 2, [rows, H / shared, blocks, shared, queries, keys]; `da`, of the same
shape, the gradient of the composed weights A. Library products write and read them. `lse` and `delta`, [sets, T, 16
BLOCKS], are the base-2 log-sum-exp and sum_j P dP of each query and head, with P the softmax weights.

    composed_weights    x -> lse, A
    post_gradients      x, da -> delta, gradients of the query's post-composition; the query's matrices
    key_gradients       x, da -> gradients of the key side of both compositions (`key_kernel.py`)
    pre_gradients       x, da -> A, gradient of the scores, gradients of the query's pre-composition

With more than 16 heads per group, `post_gradients` stores the softmax weights P, `pre_gradients` loads them and stores
the gradient dY of the composed scores, and `wide_key_gradients` loads P and da, or x and dY (`wide_key_kernel.py`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .indexing import head_of, queries_of, store_statistics, store_zeros, tokens_of
from .layouts import ACCUMULATOR, COLUMNS, PACKED, RIGHT, ROWS
from .masking import EMPTY, biases
from .mixing import store_query_gradients
from .programs import all_statistics, common_range, compositions, neighbors, pointers, query_weights
from .steps import (
    add_exponentials,
    all_hidden,
    all_offsets,
    elementwise_maximum,
    finite_maxima,
    first_sums,
    load_gradients,
    load_tiles,
    no_matrix_gradients,
    no_offsets,
    no_sums,
    post_step,
    pre_step,
    sum_keys,
    sums_step,
    visible_scores,
    weights_step,
)

LARGE = gl.constexpr(2.0**100)  # sums of exponentials outside of [1 / LARGE, LARGE] are recomputed
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def composed_weights(x, lse, pre, post, masks, sizes, KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr):
    """Compute the base-2 log-sum-exp of a program's queries and, in place, their composed weights."""
    forward(x, lse, pre, post, masks, sizes, KIND, PRE, POST, True)


@gluon.jit
def forward(
    x, lse, pre, post, masks, sizes, KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr, AHEAD: gl.constexpr
):
    """Body of `composed_weights`; with `AHEAD`, scores are loaded one step in advance."""
    programs = neighbors(masks, sizes, queries_of(KIND.BLOCKS), KIND)
    pres = compositions(pre, programs, PRE, KIND, True, False)
    posts = compositions(post, programs, POST, KIND, True, False)
    logs = store_log_sums(x, lse, programs, pres, PRE, KIND)
    store_composed(x, logs, programs, pres, posts, PRE, POST, KIND, AHEAD)


@gluon.jit
def store_log_sums(x, lse, programs, pres, PRE: gl.constexpr, KIND: gl.constexpr):
    """Compute the base-2 log-sum-exp of the composed scores of each query, and store it.

    Exponentials are relative to the maximum of the last tile. If the sum leaves the range of float32, it is recomputed
    relative to the maximum of all tiles.
    """
    at = pointers(x, programs, KIND)
    low, end, high = common_range(programs, KIND)
    offsets, totals = first_sums(at, low, gl.maximum(low, high - 1) // 16 * 16, programs, pres, PRE, KIND)
    for start in range(low, end, 16):
        tiles = load_tiles(at, start, programs, KIND, False)
        totals = sums_step(tiles, start, programs, offsets, pres, totals, PRE, KIND, False)
    for start in range(end, high - 16, 16):
        tiles = load_tiles(at, start, programs, KIND, True)
        totals = sums_step(tiles, start, programs, offsets, pres, totals, PRE, KIND, True)
    logs = ()
    for n in gl.static_range(len(programs)):
        logs = logs + (log_sums(at[n], offsets[n], totals[n], programs[n], pres[n], PRE, KIND),)
        if KIND.MASK == 2:
            store_statistics(programs[n].masks.shifts, programs[n].statistics, logs[n][0], KIND)
        store_statistics(lse, programs[n].statistics, logs[n][1], KIND)
    return logs


@gluon.jit
def log_sums(x, offsets, total, program, pre, PRE: gl.constexpr, KIND: gl.constexpr):
    """Convert sums relative to `offsets` to the offsets, including the base-2 log-sum-exp, that give softmax
    weights."""
    sums = sum_keys(total, KIND)
    bad = gl.zeros([1, 16], gl.int32, ACCUMULATOR)
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        _, _, real = head_of(gl.arange(0, 16, COLUMNS), program.set, b, program.sizes, KIND)
        good = (sums[b] > 1.0 / LARGE) & (sums[b] < LARGE)
        bad += gl.where(good | ~gl.expand_dims(real, 0), 0, 1)
    if gl.max(gl.max(bad, 1), 0) > 0:
        offsets, sums = sums_of_any_range(x, program, pre, PRE, KIND)
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.where(sums[b] > 0.0, offsets[1][b] + gl.log2(sums[b]), EMPTY),)
    return offsets[0], result


@gluon.jit
def sums_of_any_range(x, program, pre, PRE: gl.constexpr, KIND: gl.constexpr):
    """Sum the exponentials relative to the maximum over all tiles of a query."""
    shift = ()
    if KIND.MASK == 2:
        largest = all_hidden(KIND)
        for start in range(program.low, program.high, 16):
            largest = elementwise_maximum(largest, biases(tokens_of(program, start), program, KIND), KIND)
        shift = finite_maxima(largest, KIND)
    nothing, largest = (shift, no_offsets(KIND)), all_hidden(KIND)
    for start in range(program.low, program.high, 16):
        largest = elementwise_maximum(largest, visible_scores(x, start, program, nothing, pre, PRE, KIND), KIND)
    offsets, total = (shift, finite_maxima(largest, KIND)), no_sums(KIND.BLOCKS)
    for start in range(program.low, program.high, 16):
        y = visible_scores(x, start, program, offsets, pre, PRE, KIND)
        total = add_exponentials(total, y, KIND)
    return offsets, sum_keys(total, KIND)


@gluon.jit
def store_composed(
    x, logs, programs, pres, posts, PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr, AHEAD: gl.constexpr
):
    """Convert the scores of each query to composed weights, in place."""
    at = pointers(x, programs, KIND)
    low, end, high = common_range(programs, KIND)
    if AHEAD:
        tiles = load_tiles(at, low, programs, KIND, False)
        for start in range(low, end, 16):
            following = load_tiles(at, start + 16, programs, KIND, False)
            weights_step(at, tiles, start, programs, logs, pres, posts, PRE, POST, KIND, False)
            tiles = following
    else:
        for start in range(low, end, 16):
            tiles = load_tiles(at, start, programs, KIND, False)
            weights_step(at, tiles, start, programs, logs, pres, posts, PRE, POST, KIND, False)
    for start in range(end, high, 16):
        tiles = load_tiles(at, start, programs, KIND, True)
        weights_step(at, tiles, start, programs, logs, pres, posts, PRE, POST, KIND, True)
    store_hidden(x, programs, low, high, KIND)


@gluon.jit
def store_hidden(workspace, programs, low, high, KIND: gl.constexpr):
    """Store zeros in the columns of each query outside of `low` to `high`."""
    for n in gl.static_range(len(programs)):
        block, query, sizes = 0, programs[n].query, programs[n].sizes
        if KIND.BAND > 0:
            block, query = query // KIND.BAND, query % KIND.BAND
        if KIND.HAS_WINDOW or KIND.HAS_DOCUMENTS:
            store_zeros(workspace, programs[n].set, block, query, 0, low, sizes, KIND)
        covered = low + (high - low + 15) // 16 * 16
        store_zeros(workspace, programs[n].set, block, query, covered, sizes.num_keys, sizes, KIND)


@gluon.jit
def post_gradients(
    x, da, p, lse, delta, matrices, d_query, d_base, pre, post, masks, sizes,
    KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr,
):  # fmt: skip
    """The sums delta = sum_j P dP of a program's queries, and gradients of their post-composition.

    Stores, unless None, the softmax weights in a workspace `p`, and for `key_gradients` the queries' matrices of the
    pre-composition and of the transposed post-composition.
    """
    programs = neighbors(masks, sizes, 1, KIND)
    pres = compositions(pre, programs, PRE, KIND, True, False)
    posts = compositions(post, programs, POST, KIND, False, True)
    store_matrices(matrices, programs, pres, posts, PRE, POST, KIND)
    logs = all_offsets(lse, programs, KIND)
    store_deltas(x, da, p, None, logs, delta, d_query, d_base, post, programs, pres, posts, PRE, POST, KIND)


@gluon.jit
def store_deltas(
    x, da, p, a, logs, delta, d_query, d_base, post, programs, pres, posts,
    PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Store delta and gradients of the post-composition of each query.

    Softmax weights are stored in `p`, composed weights in `a`, unless None.
    """
    at, d_at = pointers(x, programs, KIND), pointers(da, programs, KIND)
    p_at, a_at = pointers(p, programs, KIND), pointers(a, programs, KIND)
    low, end, high = common_range(programs, KIND)
    totals, d_posts = (), ()
    for _ in gl.static_range(len(programs)):
        totals, d_posts = totals + (no_sums(KIND.BLOCKS),), d_posts + (no_matrix_gradients(POST, KIND),)
    for start in range(low, end, 16):
        tiles, d = load_tiles(at, start, programs, KIND, False), load_gradients(d_at, start, programs, KIND, False)
        totals, d_posts = post_step(
            p_at, a_at, tiles, d, start, programs, logs, pres, posts, totals, d_posts, PRE, POST, KIND, False
        )
    for start in range(end, high, 16):
        tiles, d = load_tiles(at, start, programs, KIND, True), load_gradients(d_at, start, programs, KIND, True)
        totals, d_posts = post_step(
            p_at, a_at, tiles, d, start, programs, logs, pres, posts, totals, d_posts, PRE, POST, KIND, True
        )
    deltas = ()
    for n in gl.static_range(len(programs)):
        deltas = deltas + (sum_keys(totals[n], KIND),)
        store_statistics(delta, programs[n].statistics, deltas[n], KIND)
        weights = query_weights(post, programs[n], POST)
        store_matrix_gradients(d_posts[n], d_query, d_base, weights, programs[n], POST, KIND, 1.0)
    return deltas


@gluon.jit
def pre_gradients(
    x, da, p, dy, lse, delta, d_query, d_base, pre, post, masks, sizes,
    KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr,
):  # fmt: skip
    """Gradients of the pre-composition of a program's queries; in place x -> A and da -> gradient of the scores.

    With softmax weights in a workspace `p`, p -> A. The gradient of the composed scores is stored in a workspace `dy`
    unless None.
    """
    programs = neighbors(masks, sizes, 1, KIND)
    pres = compositions(pre, programs, PRE, KIND, p is None, True)
    posts = compositions(post, programs, POST, KIND, True, True)
    logs, deltas = all_offsets(lse, programs, KIND), all_statistics(delta, programs, KIND)
    if p is None:
        store_score_gradients(
            x, da, p, x, da, dy, logs, deltas, d_query, d_base, pre, programs, pres, posts, PRE, POST, KIND
        )
    else:
        store_score_gradients(
            x, da, p, p, da, dy, logs, deltas, d_query, d_base, pre, programs, pres, posts, PRE, POST, KIND
        )


@gluon.jit
def store_score_gradients(
    x, da, p, a, dx, dy, logs, deltas, d_query, d_base, pre, programs, pres, posts,
    PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr,
):  # fmt: skip
    """Store gradients of the scores and of the pre-composition of each query.

    Softmax weights are loaded from `p`, or computed if it is None. Composed weights are stored in `a`, gradients of the
    composed scores in `dy`, unless None.
    """
    at, d_at, p_at = pointers(x, programs, KIND), pointers(da, programs, KIND), pointers(p, programs, KIND)
    low, end, high = common_range(programs, KIND)
    a_at, dx_at, dy_at = pointers(a, programs, KIND), pointers(dx, programs, KIND), pointers(dy, programs, KIND)
    d_pres = ()
    for _ in gl.static_range(len(programs)):
        d_pres = d_pres + (no_matrix_gradients(PRE, KIND),)
    for start in range(low, end, 16):
        tiles, d = load_tiles(at, start, programs, KIND, False), load_gradients(d_at, start, programs, KIND, False)
        d_pres = pre_step(
            p_at, a_at, dx_at, dy_at, tiles, d, start, programs, logs, deltas, pres, posts,
            d_pres, PRE, POST, KIND, False,
        )  # fmt: skip
    for start in range(end, high, 16):
        tiles, d = load_tiles(at, start, programs, KIND, True), load_gradients(d_at, start, programs, KIND, True)
        d_pres = pre_step(
            p_at, a_at, dx_at, dy_at, tiles, d, start, programs, logs, deltas, pres, posts,
            d_pres, PRE, POST, KIND, True,
        )  # fmt: skip
    if a is not None:
        store_hidden(a, programs, low, high, KIND)
    store_hidden(dx, programs, low, high, KIND)
    if dy is not None:
        store_hidden(dy, programs, low, high, KIND)
    for n in gl.static_range(len(programs)):
        weights = query_weights(pre, programs[n], PRE)
        store_matrix_gradients(d_pres[n], d_query, d_base, weights, programs[n], PRE, KIND, LN2)


class Slots(NamedTuple):
    """Offsets of the slots' heads in gradients [B, tokens, COUNT, H], and their validity, per block."""

    row_offsets: Any
    row_real: Any
    column_offsets: Any
    column_real: Any


@gluon.jit
def gradient_slots(program, COUNT: gl.constexpr, KIND: gl.constexpr):
    """Compute the `Slots` of a query's heads in gradients [B, T, COUNT, H]."""
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
    """Index of the query of a set among those of all sets of the chunk."""
    return program.set * program.sizes.num_queries + program.query


@gluon.jit
def store_matrices(matrices, programs, pres, posts, PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr):
    """Store each query's matrices for `key_gradients`, unless `matrices` is None."""
    if matrices is not None:
        for n in gl.static_range(len(programs)):
            store_right(matrices, programs[n], pres[n].matrices, 0, PRE, KIND)
            store_right(matrices, programs[n], posts[n].back, 1, POST, KIND)


@gluon.jit
def store_right(matrices, program, right, PLACE: gl.constexpr, SPEC: gl.constexpr, KIND: gl.constexpr):
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
    """Load matrices stored by `post_gradients`: of the pre-composition (0), or of the post-composition, transposed
    (1)."""
    PAIRS: gl.constexpr = KIND.BLOCKS * KIND.BLOCKS
    result = ()
    if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
        place = matrices + (query_number(program).to(gl.int64) * 2 + PLACE) * (PAIRS * 256)
        for n in gl.static_range(PAIRS):
            raw = gl.load(place + n * 256 + gl.arange(0, 256, PACKED))
            parts = gl.permute(gl.reshape(raw, [8, 4, 2, 2, 2]), [3, 1, 4, 2, 0])
            result = result + (gl.convert_layout(gl.reshape(parts, [16, 16]), RIGHT, assert_trivial=True),)
    return result
