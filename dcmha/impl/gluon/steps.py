"""Steps of the kernels' loops: a tile of 16 keys and all heads of one query, composed, weighted, and taken back."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from . import mixing
from .indexing import load_tile, store_tile, tokens_of
from .layouts import ACCUMULATOR, outer, times, to_left, zeros
from .masking import drop, hide
from .mixing import compose, load_key_vectors, weighted_sums


@gluon.jit
def visible_scores(
    x, start, AFTER: gl.constexpr, program, offsets, pre, SPEC: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr
):
    """Load a tile of scores and compose it.

    Args:
        x: Pointers to the first tile of the query's rows.
        start, AFTER: Column of the tile, as their sum.
        program: The query.
        offsets: What is subtracted from composed scores, [1, 16] of each block.
        pre: The pre-composition.
        SPEC: Its branches.
        KIND: Kind of the call.
        MASKED: Whether some keys of the tile may be hidden.

    Returns:
        The scores, left operands; the composed scores less the offsets, accumulators, `HIDDEN` where they are.
    """
    tile = load_tile(x, start, AFTER, program.sizes.S - program.first, MASKED, KIND)
    vectors = load_key_vectors(pre.key, start, AFTER, SPEC, KIND)
    return tile, composed_scores(tile, vectors, start + AFTER, program, offsets, pre, SPEC, KIND, MASKED)


@gluon.jit
def composed_scores(
    tile, vectors, start, program, offsets, pre, SPEC: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr
):
    """Compose a tile of scores: accumulators, less the offsets, `HIDDEN` where they are."""
    sums = weighted_sums(tile, vectors, program.ones, SPEC, KIND, 0)
    y, wide = negative(offsets, KIND), widened(tile, program, KIND)
    y = compose(y, tile, wide, pre.matrices, vectors, sums, program.identity, SPEC, KIND, 0)
    y = add_operands(y, tile, program, KIND)
    if MASKED:
        y = hide(y, tokens_of(program, start), program, KIND)
    return y


@gluon.jit
def weights_step(
    x, out, start, AFTER: gl.constexpr, program, lse, pre, post, PRE: gl.constexpr, POST: gl.constexpr,
    KIND: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Scores of a tile to composed weights."""
    _, y = visible_scores(x, start, AFTER, program, lse, pre, PRE, KIND, MASKED)
    p = exponentials(y, KIND)
    vectors = load_key_vectors(post.key, start, AFTER, POST, KIND)
    store_tile(out, program.real, start, AFTER, composed(p, vectors, start + AFTER, program, post, POST, KIND), KIND)


@gluon.jit
def post_step(
    x, da, start, AFTER: gl.constexpr, program, lse, pre, post, total, d_post, PRE: gl.constexpr, POST: gl.constexpr,
    KIND: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Add what a tile brings to delta and to the gradients of the query's post-composition."""
    d = load_gradient(da, start, AFTER, program, KIND, MASKED)
    _, y = visible_scores(x, start, AFTER, program, lse, pre, PRE, KIND, MASKED)
    p = exponentials(y, KIND)
    vectors = load_key_vectors(post.key, start, AFTER, POST, KIND)
    return add_delta(p, d, vectors, program, post, total, d_post, POST, KIND)


@gluon.jit
def add_delta(p, d, vectors, program, post, total, d_post, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Add what softmax weights p and gradients d of composed ones bring to delta and the query's post-composition."""
    sums, wide = weighted_sums(d, vectors, program.ones, SPEC, KIND, 1), widened(d, program, KIND)
    d_p = compose(wide, d, wide, post.back, vectors, sums, program.identity, SPEC, KIND, 1)
    added = ()
    for b in gl.static_range(gl.constexpr(KIND.BLOCKS)):
        added = added + (total[b] + p[b] * d_p[b],)
    if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
        d_post = add_outer(d_post, rounded(p, KIND), d, program.left, KIND)
    return added, d_post


@gluon.jit
def pre_step(
    x, da, dy, start, AFTER: gl.constexpr, program, lse, delta, pre, post, d_pre, PRE: gl.constexpr,
    POST: gl.constexpr, KIND: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Composed weights and gradients of the scores of a tile, and what it brings to those of the pre-composition."""
    d = load_gradient(da, start, AFTER, program, KIND, MASKED)
    tile, y = visible_scores(x, start, AFTER, program, lse, pre, PRE, KIND, MASKED)
    p = exponentials(y, KIND)
    vectors = load_key_vectors(post.key, start, AFTER, POST, KIND)
    store_tile(x, program.real, start, AFTER, composed(p, vectors, start + AFTER, program, post, POST, KIND), KIND)
    d_y = gradients_of_weights(p, d, vectors, program, delta, post, POST, KIND)
    if KIND.MASK_GRADIENT:
        store_tile(dy, program.real, start, AFTER, d_y, KIND)
    vectors = load_key_vectors(pre.key, start, AFTER, PRE, KIND)
    d_x, d_pre = score_gradients(tile, d_y, vectors, program, pre, d_pre, PRE, KIND)
    store_tile(da, program.real, start, AFTER, d_x, KIND)
    return d_pre


@gluon.jit
def gradients_of_weights(p, d, vectors, program, delta, post, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Take gradients of composed weights back to those of composed scores."""
    sums, wide = weighted_sums(d, vectors, program.ones, SPEC, KIND, 1), widened(d, program, KIND)
    d_p = compose(negative(delta, KIND), d, wide, post.back, vectors, sums, program.identity, SPEC, KIND, 1)
    return products(p, add_operands(d_p, d, program, KIND), KIND)


@gluon.jit
def score_gradients(tile, d_y, vectors, program, pre, d_pre, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Take gradients of composed scores back to those of scores; add to those of the query's pre-composition."""
    d_left = rounded(d_y, KIND)
    if SPEC.QUERY_RANK + SPEC.QUERY_GATE + SPEC.BASE > 0:
        d_pre = add_outer(d_pre, tile, d_left, program.left, KIND)
    sums = weighted_sums(d_left, vectors, program.ones, SPEC, KIND, 1)
    return compose(d_y, d_left, d_y, pre.back, vectors, sums, program.identity, SPEC, KIND, 1), d_pre


@gluon.jit
def composed(p, vectors, start, program, post, SPEC: gl.constexpr, KIND: gl.constexpr):
    """Compose a tile of softmax weights, and drop some."""
    p_left = rounded(p, KIND)
    sums = weighted_sums(p_left, vectors, program.ones, SPEC, KIND, 0)
    a = compose(p, p_left, p, post.matrices, vectors, sums, program.identity, SPEC, KIND, 0)
    if KIND.HAS_DROPOUT:
        a = drop(a, program.words, tokens_of(program, start), program.masks, KIND)
    return a


@gluon.jit
def load_gradient(da, start, AFTER: gl.constexpr, program, KIND: gl.constexpr, MASKED: gl.constexpr):
    """Load a tile of gradients of composed weights; those of dropped ones are 0."""
    d = load_tile(da, start, AFTER, program.sizes.S - program.first, MASKED, KIND)
    if KIND.HAS_DROPOUT:
        tokens = tokens_of(program, start + AFTER)
        d = rounded(drop(widened(d, program, KIND), program.words, tokens, program.masks, KIND), KIND)
    return d


@gluon.jit
def negative(offsets, KIND: gl.constexpr):
    """Make accumulators of offsets [1, 16] of the heads, negated."""
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
