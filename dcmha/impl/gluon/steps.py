"""Steps of the kernels' loops: forward and backward composition of a tile of 16 keys and all heads of each query.

The queries of a program share the loaded and converted weights of the keys. The offsets of a query are two values per
head, [1, 16] per block: one is subtracted from a floating mask (() without one), the other from composed scores in
units of log 2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import mixing
from .indexing import load_statistics, load_tile, store_tile, tokens_of
from .layouts import ACCUMULATOR, outer, times, to_left, zeros
from .masking import HIDDEN, LOG2E, biases, drop, hide, visible_pairs, zero_hidden
from .mixing import compose, load_key_vectors, weighted_sums


@gluon.jit
def load_tiles(at, start, programs, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Load a tile of scores of each query."""
    result = ()
    for n in gl.static_range(len(programs)):
        result = result + (load_tile(at[n], start, programs[n].sizes.S - programs[n].first, MASKED, KIND),)
    return result


@gluon.jit
def load_gradients(at, start, programs, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Load a tile of gradients of composed weights of each query."""
    result = ()
    for n in gl.static_range(len(programs)):
        result = result + (load_gradient(at[n], start, programs[n], KIND, MASKED),)
    return result


@gluon.jit
def load_weights(at, start, programs, KIND: gl.constexpr):
    """Load a tile of softmax weights of each query, as accumulators."""
    result = ()
    for n in gl.static_range(len(programs)):
        result = result + (widened(load_tile(at[n], start, 0, False, KIND), programs[n], KIND),)
    return result


@gluon.jit
def first_sums(at, low, start, programs, pres, PRE: gl.constexpr, KIND: gl.constexpr):
    """Initialize the offsets with the maxima of a tile, and the sums of exponentials relative to them.

    With a floating mask two tiles are used, the last one and that at `low`, because large negative mask values often
    hide the keys of one side.
    """
    tiles, vectors = load_tiles(at, start, programs, KIND, True), load_key_vectors(pres[0].key, start, PRE, KIND)
    offsets, totals = (), ()
    for n in gl.static_range(len(programs)):
        shift = ()
        if KIND.MASK == 2:
            first = biases(tokens_of(programs[n], low), programs[n], KIND)
            shift = finite_maxima(
                elementwise_maximum(first, biases(tokens_of(programs[n], start), programs[n], KIND), KIND), KIND
            )
        nothing = (shift, no_offsets(KIND))
        y, _ = composed_scores(tiles[n], vectors, start, programs[n], nothing, pres[n], PRE, KIND, True)
        largest = y
        if KIND.MASK == 2:
            largest = elementwise_maximum(y, visible_scores(at[n], low, programs[n], nothing, pres[n], PRE, KIND), KIND)
        largest, exponents = finite_maxima(largest, KIND), ()
        for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
            exponents = exponents + (y[b] - largest[b],)
        offsets, totals = offsets + ((shift, largest),), totals + (exponentials(exponents, KIND),)
    return offsets, totals


@gluon.jit
def visible_scores(x, start, program, offsets, pre, PRE: gl.constexpr, KIND: gl.constexpr):
    """Load a tile of a query's scores and compose it: minus the offsets, `HIDDEN` for hidden keys."""
    tile = load_tile(x, start, program.sizes.S - program.first, True, KIND)
    vectors = load_key_vectors(pre.key, start, PRE, KIND)
    return composed_scores(tile, vectors, start, program, offsets, pre, PRE, KIND, True)[0]


@gluon.jit
def sums_step(
    tiles, start, programs, offsets, pres, totals, PRE: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr
):
    """Add the exponentials of a tile of each query."""
    vectors = load_key_vectors(pres[0].key, start, PRE, KIND)
    result = ()
    for n in gl.static_range(len(programs)):
        y, _ = composed_scores(tiles[n], vectors, start, programs[n], offsets[n], pres[n], PRE, KIND, MASKED)
        result = result + (add_exponentials(totals[n], y, KIND),)
    return result


@gluon.jit
def softmax_weights(tiles, start, programs, logs, pres, PRE: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Compute the softmax weights of a tile of each query; also return the masked tiles of scores."""
    vectors = load_key_vectors(pres[0].key, start, PRE, KIND)
    result, taken = (), ()
    for n in gl.static_range(len(programs)):
        y, tile = composed_scores(tiles[n], vectors, start, programs[n], logs[n], pres[n], PRE, KIND, MASKED)
        result, taken = result + (exponentials(y, KIND),), taken + (tile,)
    return result, taken


@gluon.jit
def weights_step(
    at, tiles, start, programs, logs, pres, posts, PRE: gl.constexpr, POST: gl.constexpr, KIND: gl.constexpr,
    MASKED: gl.constexpr,
):  # fmt: skip
    """Convert a tile of scores of each query to composed weights."""
    p, _ = softmax_weights(tiles, start, programs, logs, pres, PRE, KIND, MASKED)
    vectors = load_key_vectors(posts[0].key, start, POST, KIND)
    store_weights(at, p, vectors, start, programs, posts, POST, KIND)


@gluon.jit
def post_step(
    p_at, a_at, tiles, d, start, programs, logs, pres, posts, totals, d_posts, PRE: gl.constexpr, POST: gl.constexpr,
    KIND: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add the contribution of a tile of each query to delta and the gradients of the query's post-composition.

    Softmax weights are stored at `p_at`, composed weights at `a_at`, unless ().
    """
    p, _ = softmax_weights(tiles, start, programs, logs, pres, PRE, KIND, MASKED)
    if len(p_at) > 0:
        for n in gl.static_range(len(programs)):
            store_tile(p_at[n], programs[n].real, start, p[n], KIND)
    vectors = load_key_vectors(posts[0].key, start, POST, KIND)
    new_totals, new_posts = (), ()
    for n in gl.static_range(len(programs)):
        total, d_post = add_delta(p[n], d[n], vectors, programs[n], posts[n], totals[n], d_posts[n], POST, KIND)
        new_totals, new_posts = new_totals + (total,), new_posts + (d_post,)
    if len(a_at) > 0:
        store_weights(a_at, p, vectors, start, programs, posts, POST, KIND)
    return new_totals, new_posts


@gluon.jit
def store_weights(at, p, vectors, start, programs, posts, POST: gl.constexpr, KIND: gl.constexpr):
    """Compose a tile of softmax weights of each query, and store it."""
    for n in gl.static_range(len(programs)):
        a = composed(p[n], vectors, start, programs[n], posts[n], POST, KIND)
        store_tile(at[n], programs[n].real, start, a, KIND)


@gluon.jit
def pre_step(
    p_at, a_at, dx_at, dy_at, tiles, d, start, programs, logs, deltas, pres, posts, d_pres, PRE: gl.constexpr,
    POST: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Compute gradients of the scores of a tile of each query, and add to those of the query's pre-composition.

    Softmax weights are loaded from `p_at`, or computed if it is (). Composed weights are stored at `a_at`, gradients of
    composed scores at `dy_at`, unless ().
    """
    vectors = load_key_vectors(posts[0].key, start, POST, KIND)
    if len(p_at) > 0:
        p = load_weights(p_at, start, programs, KIND)
    else:
        p, tiles = softmax_weights(tiles, start, programs, logs, pres, PRE, KIND, MASKED)
    if len(a_at) > 0:
        store_weights(a_at, p, vectors, start, programs, posts, POST, KIND)
    d_y, new_pres = (), ()
    for n in gl.static_range(len(programs)):
        d_y = d_y + (gradients_of_weights(p[n], d[n], vectors, programs[n], deltas[n], posts[n], POST, KIND),)
        if len(dy_at) > 0:
            store_tile(dy_at[n], programs[n].real, start, d_y[n], KIND)
    vectors = load_key_vectors(pres[0].key, start, PRE, KIND)
    for n in gl.static_range(len(programs)):
        d_x, d_pre = score_gradients(tiles[n], d_y[n], vectors, programs[n], pres[n], d_pres[n], PRE, KIND)
        store_tile(dx_at[n], programs[n].real, start, d_x, KIND)
        new_pres = new_pres + (d_pre,)
    return new_pres


@gluon.jit
def composed_scores(
    tile, vectors, start, program, offsets, pre, SPEC: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr
):
    """Compose a tile of scores: accumulators minus the offsets, `HIDDEN` for hidden keys; also return the masked
    tile."""
    tile, bias, visible = apply_mask(tile, start, program, KIND, MASKED)
    sums = weighted_sums(tile, vectors, program.ones, SPEC, KIND, 0)
    y, wide = initial_accumulators(offsets, bias, KIND), widened(tile, program, KIND)
    y = compose(y, tile, wide, pre.matrices, vectors, sums, program.identity, SPEC, KIND, 0)
    y = add_operands(y, tile, program, KIND)
    if MASKED:
        y = hide(y, visible, KIND)
    return y, tile


@gluon.jit
def apply_mask(tile, start, program, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Load the mask of a tile. If batch rows share the tile, hidden scores are set to 0.

    Returns the tile, the values of a floating mask, and which pairs are visible, per block; () without a mask.
    """
    tokens, bias, visible = tokens_of(program, start), (), ()
    if KIND.MASK == 2:
        bias = biases(tokens, program, KIND)
    if MASKED:
        visible = visible_pairs(tokens, bias, program, KIND)
        if KIND.GROUP_SLOTS < 16:
            tile = zero_hidden(tile, visible, program, KIND)
    return tile, bias, visible


@gluon.jit
def initial_accumulators(offsets, bias, KIND: gl.constexpr):
    """Initialize the accumulators of composed scores: the negated offsets plus a floating mask."""
    if KIND.MASK != 2:
        return negative(offsets[1], KIND)
    else:  # large values cancel before others are added
        result = ()
        for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
            result = result + ((bias[b] - offsets[0][b]) * LOG2E - offsets[1][b],)
        return result


@gluon.jit
def load_offsets(lse, program, KIND: gl.constexpr):
    """Load the offsets with which exponentials of a query's composed scores are softmax weights."""
    shift = ()
    if KIND.MASK == 2:
        shift = load_statistics(program.masks.shifts, program.statistics, KIND)
    return shift, load_statistics(lse, program.statistics, KIND)


@gluon.jit
def all_offsets(lse, programs, KIND: gl.constexpr):
    """Load the offsets of each query."""
    result = ()
    for n in gl.static_range(len(programs)):
        result = result + (load_offsets(lse, programs[n], KIND),)
    return result


@gluon.jit
def add_delta(p, d, vectors, program, post, total, d_post, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Add the contribution of softmax weights p and gradients d of composed weights to delta and the
    post-composition."""
    sums, wide = weighted_sums(d, vectors, program.ones, SPEC, KIND, 1), widened(d, program, KIND)
    d_p = compose(wide, d, wide, post.back, vectors, sums, program.identity, SPEC, KIND, 1)
    added = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        added = added + (total[b] + p[b] * d_p[b],)
    if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
        d_post = add_outer(d_post, rounded(p, KIND), d, program.left, KIND)
    return added, d_post


@gluon.jit
def gradients_of_weights(p, d, vectors, program, delta, post, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Backpropagate from composed weights to composed scores."""
    sums, wide = weighted_sums(d, vectors, program.ones, SPEC, KIND, 1), widened(d, program, KIND)
    d_p = compose(negative(delta, KIND), d, wide, post.back, vectors, sums, program.identity, SPEC, KIND, 1)
    return products(p, add_operands(d_p, d, program, KIND), KIND)


@gluon.jit
def score_gradients(tile, d_y, vectors, program, pre, d_pre, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Backpropagate from composed scores to scores; add to the gradients of the query's pre-composition."""
    d_left = rounded(d_y, KIND)
    if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
        d_pre = add_outer(d_pre, tile, d_left, program.left, KIND)
    sums = weighted_sums(d_left, vectors, program.ones, SPEC, KIND, 1)
    return compose(d_y, d_left, d_y, pre.back, vectors, sums, program.identity, SPEC, KIND, 1), d_pre


@gluon.jit
def composed(p, vectors, start, program, post, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Compose a tile of softmax weights, with dropout."""
    p_left = rounded(p, KIND)
    sums = weighted_sums(p_left, vectors, program.ones, SPEC, KIND, 0)
    a = compose(p, p_left, p, post.matrices, vectors, sums, program.identity, SPEC, KIND, 0)
    if KIND.HAS_DROPOUT:
        a = drop(a, program.words, tokens_of(program, start), program.masks, KIND)
    return a


@gluon.jit
def load_gradient(da, start, program, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Load a tile of gradients of composed weights; those of dropped ones are 0."""
    d = load_tile(da, start, program.sizes.S - program.first, MASKED, KIND)
    if KIND.HAS_DROPOUT:
        tokens = tokens_of(program, start)
        d = rounded(drop(widened(d, program, KIND), program.words, tokens, program.masks, KIND), KIND)
    return d


@gluon.jit
def negative(offsets, KIND: gl.constexpr):
    """Accumulators filled with the negated offsets [1, 16] of the heads."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (zeros() - offsets[b],)
    return result


@gluon.jit
def add_operands(y, x, program, KIND: gl.constexpr):
    """Add left operands to accumulators, by an exact product with the identity."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (times(x[b], program.identity, y[b], KIND.GROUP_SLOTS < 16),)
    return result


@gluon.jit
def no_offsets(KIND: gl.constexpr):
    """Return an offset of 0 for each head."""
    result = ()
    for _ in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.zeros([1, 16], gl.float32, ACCUMULATOR),)
    return result


@gluon.jit
def no_sums(COUNT: gl.constexpr):
    """Return accumulators of zeros."""
    result = ()
    for _ in gl.static_range(COUNT):
        result = result + (zeros(),)
    return result


@gluon.jit
def exponentials(y, KIND: gl.constexpr):
    """Return 2^y."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.exp2(y[b]),)
    return result


@gluon.jit
def products(x, y, KIND: gl.constexpr):
    """Multiply accumulators elementwise."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (x[b] * y[b],)
    return result


@gluon.jit
def rounded(x, KIND: gl.constexpr):
    """Round accumulators to left operands."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (to_left(x[b], KIND.DTYPE),)
    return result


@gluon.jit
def widened(x, program, KIND: gl.constexpr):
    """Convert left operands to accumulators."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (mixing.widened(x[b], program.identity, KIND),)
    return result


@gluon.jit
def add_outer(d, x, y, identity, KIND: gl.constexpr):
    """Add x^T y of each pair of blocks to accumulators [16 heads, 16 heads]."""
    result = ()
    for a in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
            result = result + (outer(d[a * KIND.BLOCKS + b], x[a], y[b], identity, KIND.DTYPE),)
    return result


@gluon.jit
def finite_maxima(y, KIND: gl.constexpr):
    """Maximum over the keys, [1, 16] per block; 0 if all are hidden."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        largest = gl.expand_dims(gl.max(y[b], 0), 0)
        result = result + (gl.where(largest > HIDDEN, largest, 0.0),)
    return result


@gluon.jit
def add_exponentials(total, y, KIND: gl.constexpr):
    """Add 2^y to sums."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (total[b] + gl.exp2(y[b]),)
    return result


@gluon.jit
def elementwise_maximum(x, y, KIND: gl.constexpr):
    """Elementwise maximum of accumulators."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.maximum(x[b], y[b]),)
    return result


@gluon.jit
def sum_keys(x, KIND: gl.constexpr):
    """Sum over the keys: [1, 16] per block."""
    result = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.expand_dims(gl.sum(x[b], 0), 0),)
    return result


@gluon.jit
def all_hidden(KIND: gl.constexpr):
    """Return accumulators of the scores of hidden keys."""
    result = ()
    for _ in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        result = result + (gl.full([16, 16], HIDDEN, gl.float32, ACCUMULATOR),)
    return result


@gluon.jit
def no_matrix_gradients(SPEC: gl.constexpr, KIND: gl.constexpr):
    """Initialize the gradients of a query's matrices."""
    if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
        return no_sums(KIND.BLOCKS * KIND.BLOCKS)
    else:
        return ()
