"""What composition costs: the paper's approximation (table 2, appendix E) and exact counts."""

from typing import NamedTuple


class ComposeCost(NamedTuple):
    """Extra parameters and matrix FLOPs (two per multiply-add) of composition in one layer."""

    params: int
    flops: int


def approximate_overhead(head_dim: int, rank: int, rho: float) -> tuple[float, float]:
    """Estimate the relative overhead of a transformer layer, as table 2 of the paper does.

    It counts multiply-adds, assumes T = S and head_dim >> 2 rank, pre and post composition, both sides, all heads
    together.

    Args:
        head_dim: D_h.
        rank: R.
        rho: Sequence length over model width, S / D_m.

    Returns:
        Extra parameters and extra FLOPs, as fractions of the layer's.
    """
    params = (2 * rank + 1) / (3 * head_dim)
    flops = 4 * (2 * rank + 1) * (1 + rho) / ((12 + rho) * head_dim)
    return params, flops


def compose_cost(
    dim: int,
    num_heads: int,
    num_queries: int,
    num_keys: int,
    *,
    rank: int = 2,
    pre_compose: bool = True,
    post_compose: bool = True,
    query_wise: bool = True,
    key_wise: bool = True,
    dynamic_gate: bool = True,
    static_base: bool = False,
    num_groups: int = 1,
) -> ComposeCost:
    """Count exactly what composition adds to one layer and one sequence, in the forward pass.

    FLOPs are those of matrix products and sums over heads, as the dense reference does them: making the weights from
    the tokens, and the down and up projections and the base of every query-key pair. Element-wise work (gates, norm,
    softmax, a sum of one term such as the up projection of rank 1) is not counted, and no pair is skipped.

    Args:
        dim: Width C of the tokens.
        num_heads: H.
        num_queries: T.
        num_keys: S.
        rank: As in `ComposeProjection`, like the options below.
        pre_compose: Compose scores.
        post_compose: Compose weights.
        query_wise: Query side on.
        key_wise: Key side on.
        dynamic_gate: Gates on.
        static_base: Static base on.
        num_groups: G.
    """
    compositions = pre_compose + post_compose
    group_heads = num_heads // num_groups
    width = 2 * rank * group_heads
    pairs = num_queries * num_keys
    per_pair = rank * num_heads * ((group_heads > 1) + (rank > 1))  # down sums over heads, up over ranks
    params = flops = 0
    for tokens in [num_queries] * query_wise + [num_keys] * key_wise:
        per_token = num_groups * (dim * width + width * width) + dynamic_gate * dim * num_heads
        params += compositions * per_token
        flops += compositions * (2 * tokens * per_token + 2 * pairs * per_pair)
    if static_base:
        params += compositions * num_heads * group_heads
        flops += compositions * 2 * pairs * num_heads * group_heads * (group_heads > 1)
    return ComposeCost(params, flops)
