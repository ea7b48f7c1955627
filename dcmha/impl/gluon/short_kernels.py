"""The query-side kernels for short rows: one forward and one backward, two neighbouring queries a program.

    short_weights       x -> lse, A (in place)
    short_gradients     x, da -> A, gradient of the scores, delta, gradients of the query side of both compositions;
                        the queries' matrices

Each goes over its rows twice: what it reads again is in the first cache. The queries share what is loaded and converted
of the keys' weights. `short_gradients` leaves x and da to `key_gradients`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .indexing import load_statistics, load_tile, store_statistics, store_tile
from .kernels import (
    LN2,
    add_exponentials,
    finite_maxima,
    log_sums,
    no_matrix_gradients,
    store_hidden,
    store_matrices,
    store_matrix_gradients,
    sum_keys,
)
from .mixing import load_key_vectors
from .programs import composition_of, describe_query, query_weights, tile_pointers
from .steps import (
    add_delta,
    composed,
    composed_scores,
    exponentials,
    gradients_of_weights,
    load_gradient,
    no_offsets,
    no_sums,
    score_gradients,
)

QUERIES = gl.constexpr(2)  # of a program: structures are not added to tuples, which loses their names in Triton 3.6


@gluon.jit
def short_weights(x, lse, pre, post, masks, sizes, KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr):
    """Scores of two queries to their base-2 log-sum-exp and, in place, composed weights."""
    programs = neighbours(masks, sizes, KIND)
    low, end, high = common_range(programs, KIND)
    pres, posts = (
        compositions(pre, programs, PRE, KIND, True, False),
        compositions(post, programs, POST, KIND, True, False),
    )
    at = pointers(x, programs, KIND)
    offsets, totals = first_sums(at, gl.maximum(low, high - 1) // 16 * 16, programs, pres, PRE, KIND)
    for start in range(low, end, 16):
        totals = sums_step(at, start, programs, offsets, pres, totals, PRE, KIND, False)
    for start in range(end, high - 16, 16):
        totals = sums_step(at, start, programs, offsets, pres, totals, PRE, KIND, True)
    logs = ()
    for n in gl.static_range(QUERIES):
        logs = logs + (log_sums(at[n], offsets[n], totals[n], programs[n], pres[n], PRE, KIND),)
        store_statistics(lse, programs[n].statistics, logs[n], KIND)
    for start in range(low, end, 16):
        weights_step(at, start, programs, logs, pres, posts, PRE, POST, KIND, False)
    for start in range(end, high, 16):
        weights_step(at, start, programs, logs, pres, posts, PRE, POST, KIND, True)
    for n in gl.static_range(QUERIES):
        store_hidden(x, programs[n], low, high, KIND)


@gluon.jit
def short_gradients(
    x, da, a, dx, lse, delta, matrices, d_pre_query, d_post_query, pre_base, post_base, pre, post, masks, sizes,
    KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr,
):  # fmt: skip
    """Composed weights, gradients of the scores and the sums delta of two queries, and gradients of their weights."""
    programs = neighbours(masks, sizes, KIND)
    low, end, high = common_range(programs, KIND)
    at, d_at = pointers(x, programs, KIND), pointers(da, programs, KIND)
    a_at, dx_at = pointers(a, programs, KIND), pointers(dx, programs, KIND)
    pres, posts = (
        compositions(pre, programs, PRE, KIND, True, False),
        compositions(post, programs, POST, KIND, True, True),
    )
    logs, totals, d_posts, d_pres = (), (), (), ()
    for n in gl.static_range(QUERIES):
        if matrices is not None:
            store_matrices(matrices, programs[n], pres[n].matrices, 0, PRE, KIND)
            store_matrices(matrices, programs[n], posts[n].back, 1, POST, KIND)
        logs = logs + (load_statistics(lse, programs[n].statistics, KIND),)
        totals, d_posts = totals + (no_sums(KIND.BLOCKS),), d_posts + (no_matrix_gradients(POST, KIND),)
        d_pres = d_pres + (no_matrix_gradients(PRE, KIND),)
    for start in range(low, end, 16):
        totals, d_posts = post_step(
            at, d_at, a_at, start, programs, logs, pres, posts, totals, d_posts, PRE, POST, KIND, False
        )
    for start in range(end, high, 16):
        totals, d_posts = post_step(
            at, d_at, a_at, start, programs, logs, pres, posts, totals, d_posts, PRE, POST, KIND, True
        )
    deltas = ()
    for n in gl.static_range(QUERIES):
        deltas = deltas + (sum_keys(totals[n], KIND),)
        store_statistics(delta, programs[n].statistics, deltas[n], KIND)
        weights = query_weights(post, programs[n], POST)
        store_matrix_gradients(d_posts[n], d_post_query, post_base, weights, programs[n], POST, KIND, 1.0)
    # built again: registers do not hold them through the loops above
    pres, posts = (
        compositions(pre, programs, PRE, KIND, True, True),
        compositions(post, programs, POST, KIND, False, True),
    )
    for start in range(low, end, 16):
        d_pres = pre_step(at, d_at, dx_at, start, programs, logs, deltas, pres, posts, d_pres, PRE, POST, KIND, False)
    for start in range(end, high, 16):
        d_pres = pre_step(at, d_at, dx_at, start, programs, logs, deltas, pres, posts, d_pres, PRE, POST, KIND, True)
    for n in gl.static_range(QUERIES):
        store_hidden(a, programs[n], low, high, KIND)
        store_hidden(dx, programs[n], low, high, KIND)
        weights = query_weights(pre, programs[n], PRE)
        store_matrix_gradients(d_pres[n], d_pre_query, pre_base, weights, programs[n], PRE, KIND, LN2)


@gluon.jit
def neighbours(masks, sizes, KIND: gl.constexpr):
    """Describe the queries of a program; the last one twice where a chunk ends. The longest rows come first."""
    number, set = gl.program_id(0), gl.program_id(1)
    if KIND.IS_CAUSAL and KIND.BAND == 0:
        number = (sizes.num_queries - 1) // QUERIES - number
    first, second = number * QUERIES, gl.minimum(number * QUERIES + 1, sizes.num_queries - 1)
    return describe_number(masks, sizes, set, first, KIND), describe_number(masks, sizes, set, second, KIND)


@gluon.jit
def describe_number(masks, sizes, set, number, KIND: gl.constexpr):
    """Describe a query by its number in the chunk."""
    if KIND.BAND > 0:
        return describe_query(masks, sizes, set, number // KIND.BAND, number % KIND.BAND, KIND)
    else:
        return describe_query(masks, sizes, set, 0, number, KIND)


@gluon.jit
def common_range(programs, KIND: gl.constexpr):
    """Return the first column that any of the queries sees, from which on tiles are masked, and the end of all."""
    low, whole, high = programs[0].low, programs[0].high, programs[0].high
    for n in gl.static_range(1, QUERIES):
        low, whole = gl.minimum(low, programs[n].low), gl.minimum(whole, programs[n].high)
        high = gl.maximum(high, programs[n].high)
    if KIND.HAS_WINDOW or KIND.HAS_DOCUMENTS or KIND.MASK > 0:
        whole = low
    return low, gl.maximum(low, gl.minimum(whole, high - 1) // 16 * 16), high


@gluon.jit
def compositions(packed, programs, SPEC: gl.constexpr, KIND: gl.constexpr, FORTH: gl.constexpr, BACK: gl.constexpr):
    """Build the composition of each query."""
    first = composition_of(packed, programs[0], SPEC, KIND, FORTH, BACK)
    return first, composition_of(packed, programs[1], SPEC, KIND, FORTH, BACK)


@gluon.jit
def pointers(workspace, programs, KIND: gl.constexpr):
    """Point at the first tile of each query."""
    result = ()
    for n in gl.static_range(QUERIES):
        result = result + (tile_pointers(workspace, programs[n], KIND),)
    return result


@gluon.jit
def load_tiles(at, start, programs, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Load a tile of scores of each query."""
    result = ()
    for n in gl.static_range(QUERIES):
        result = result + (load_tile(at[n], start, 0, programs[n].sizes.S - programs[n].first, MASKED, KIND),)
    return result


@gluon.jit
def load_gradients(at, start, programs, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Load a tile of gradients of composed weights of each query."""
    result = ()
    for n in gl.static_range(QUERIES):
        result = result + (load_gradient(at[n], start, 0, programs[n], KIND, MASKED),)
    return result


@gluon.jit
def first_sums(at, start, programs, pres, PRE: gl.constexpr, KIND: gl.constexpr):
    """Take the largest composed scores of a tile as offsets, and begin the sums of exponentials relative to them."""
    tiles, vectors = load_tiles(at, start, programs, KIND, True), load_key_vectors(pres[0].key, start, 0, PRE, KIND)
    offsets, totals = (), ()
    for n in gl.static_range(QUERIES):
        y = composed_scores(tiles[n], vectors, start, programs[n], no_offsets(KIND), pres[n], PRE, KIND, True)
        largest, exponents = finite_maxima(y, KIND), ()
        for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
            exponents = exponents + (y[b] - largest[b],)
        offsets, totals = offsets + (largest,), totals + (exponentials(exponents, KIND),)
    return offsets, totals


@gluon.jit
def sums_step(at, start, programs, offsets, pres, totals, PRE: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Add the exponentials of a tile of each query."""
    vectors = load_key_vectors(pres[0].key, start, 0, PRE, KIND)
    tiles = load_tiles(at, start, programs, KIND, MASKED)
    result = ()
    for n in gl.static_range(QUERIES):
        y = composed_scores(tiles[n], vectors, start, programs[n], offsets[n], pres[n], PRE, KIND, MASKED)
        result = result + (add_exponentials(totals[n], y, KIND),)
    return result


@gluon.jit
def softmax_weights(tiles, start, programs, logs, pres, PRE: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Compose a tile of scores of each query, and make softmax weights of them."""
    vectors = load_key_vectors(pres[0].key, start, 0, PRE, KIND)
    result = ()
    for n in gl.static_range(QUERIES):
        y = composed_scores(tiles[n], vectors, start, programs[n], logs[n], pres[n], PRE, KIND, MASKED)
        result = result + (exponentials(y, KIND),)
    return result


@gluon.jit
def weights_step(
    at, start, programs, logs, pres, posts, PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of a tile of each query to composed weights."""
    tiles = load_tiles(at, start, programs, KIND, MASKED)
    p = softmax_weights(tiles, start, programs, logs, pres, PRE, KIND, MASKED)
    vectors = load_key_vectors(posts[0].key, start, 0, POST, KIND)
    for n in gl.static_range(QUERIES):
        a = composed(p[n], vectors, start, programs[n], posts[n], POST, KIND)
        store_tile(at[n], programs[n].real, start, 0, a, KIND)


@gluon.jit
def post_step(
    at, d_at, a_at, start, programs, logs, pres, posts, totals, d_posts, PRE: gl.constexpr, POST: gl.constexpr,
    KIND: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Composed weights of a tile of each query, and what it brings to delta and the query's post-composition."""
    tiles, d = load_tiles(at, start, programs, KIND, MASKED), load_gradients(d_at, start, programs, KIND, MASKED)
    p = softmax_weights(tiles, start, programs, logs, pres, PRE, KIND, MASKED)
    vectors = load_key_vectors(posts[0].key, start, 0, POST, KIND)
    new_totals, new_posts = (), ()
    for n in gl.static_range(QUERIES):
        total, d_post = add_delta(p[n], d[n], vectors, programs[n], posts[n], totals[n], d_posts[n], POST, KIND)
        new_totals, new_posts = new_totals + (total,), new_posts + (d_post,)
    for n in gl.static_range(QUERIES):
        a = composed(p[n], vectors, start, programs[n], posts[n], POST, KIND)
        store_tile(a_at[n], programs[n].real, start, 0, a, KIND)
    return new_totals, new_posts


@gluon.jit
def pre_step(
    at, d_at, dx_at, start, programs, logs, deltas, pres, posts, d_pres, PRE: gl.constexpr, POST: gl.constexpr,
    KIND: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Gradients of the scores of a tile of each query, and what it brings to the query's pre-composition."""
    tiles, d = load_tiles(at, start, programs, KIND, MASKED), load_gradients(d_at, start, programs, KIND, MASKED)
    vectors = load_key_vectors(posts[0].key, start, 0, POST, KIND)
    p = softmax_weights(tiles, start, programs, logs, pres, PRE, KIND, MASKED)
    d_y, new_pres = (), ()
    for n in gl.static_range(QUERIES):
        d_y = d_y + (gradients_of_weights(p[n], d[n], vectors, programs[n], deltas[n], posts[n], POST, KIND),)
    vectors = load_key_vectors(pres[0].key, start, 0, PRE, KIND)
    for n in gl.static_range(QUERIES):
        d_x, d_pre = score_gradients(tiles[n], d_y[n], vectors, programs[n], pres[n], d_pres[n], PRE, KIND)
        store_tile(dx_at[n], programs[n].real, start, 0, d_x, KIND)
        new_pres = new_pres + (d_pre,)
    return new_pres
