"""The query-side kernels for short rows, whose repeated reads hit the L1 cache.

    short_weights       x -> lse, A (in place)
    short_gradients     x, da -> A, gradient of the scores, delta, gradients of the query side of both compositions;
                        the queries' matrices

`short_gradients` iterates over its rows twice, like `post_gradients` and `pre_gradients`. It does not modify x and da,
which `key_gradients` reads.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .indexing import queries_of
from .kernels import forward, store_deltas, store_hidden, store_matrices, store_score_gradients
from .programs import common_range, compositions, neighbors
from .steps import all_offsets


@gluon.jit
def short_weights(x, lse, pre, post, masks, sizes, KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr):
    """Compute the base-2 log-sum-exp of a program's queries and, in place, their composed weights."""
    forward(x, lse, pre, post, masks, sizes, KIND, PRE, POST, False)


@gluon.jit
def short_gradients(
    x, da, a, dx, lse, delta, matrices, d_pre_query, d_post_query, pre_base, post_base, pre, post, masks, sizes,
    KIND: gl.constexpr, PRE: gl.constexpr, POST: gl.constexpr,
):  # fmt: skip
    """Compute composed weights, gradients of the scores, delta, and gradients of the query side."""
    programs = neighbors(masks, sizes, queries_of(KIND.BLOCKS), KIND)
    pres = compositions(pre, programs, PRE, KIND, True, False)
    posts = compositions(post, programs, POST, KIND, True, True)
    store_matrices(matrices, programs, pres, posts, PRE, POST, KIND)
    logs = all_offsets(lse, programs, KIND)
    deltas = store_deltas(
        x, da, None, a, logs, delta, d_post_query, post_base, post, programs, pres, posts, PRE, POST, KIND
    )  # fmt: skip
    # rebuilt, because they do not fit into registers across the loops above
    pres = compositions(pre, programs, PRE, KIND, True, True)
    posts = compositions(post, programs, POST, KIND, False, True)
    store_score_gradients(
        x, da, None, None, dx, None, logs, deltas, d_pre_query, pre_base, pre, programs, pres, posts, PRE, POST, KIND
    )
    low, _, high = common_range(programs, KIND)
    store_hidden(a, programs, low, high, KIND)
