"""Cost of composed attention: the paper's approximation (table 2, appendix E), and exact counts.

Benchmarks and model FLOPs utilization both use these counts. A multiply-add of a matrix product, or of a sum over heads
or ranks as in the dense reference, counts as two FLOPs; element-wise work (gates, norm, softmax, a sum of one term such
as the up projection of rank 1) is not counted.
"""

from typing import NamedTuple

from .checks import check_integers, check_numbers
from .options import ComposeOptions


class ComposeCost(NamedTuple):
    """Extra parameters and FLOPs of composition in one layer."""

    params: int
    flops: int


def approximate_overhead(head_dim: int, rank: int, rho: float) -> tuple[float, float]:
    """Estimate the relative overhead in a transformer layer, as in table 2 of the paper.

    Counts multiply-adds and assumes T = S, head_dim >> 2 rank, pre- and post-composition, both sides, and one group of
    heads.

    Args:
        head_dim: D_h.
        rank: R.
        rho: Sequence length over model width, S / D_m.

    Returns:
        Extra parameters and extra FLOPs, as fractions of the layer's.
    """
    check_integers(head_dim=head_dim)
    check_integers(least=0, rank=rank)
    check_numbers(low=0, rho=rho)
    params = (2 * rank + 1) / (3 * head_dim)
    flops = 4 * (2 * rank + 1) * (1 + rho) / ((12 + rho) * head_dim)
    return params, flops


def visible_pairs(num_queries: int, num_keys: int, *, is_causal: bool = False, window_size: int | None = None) -> int:
    """Count the visible pairs of a query and a key for `is_causal` and `window_size` as in `composed_attention`.

    Args:
        num_queries: T.
        num_keys: S.
        is_causal: Hide later keys.
        window_size: Keys visible to a query, or None.
    """
    check_integers(least=0, num_queries=num_queries, num_keys=num_keys)
    check_integers(may_be_none=True, window_size=window_size)
    if not is_causal and window_size is None:
        return num_queries * num_keys
    start = num_keys - num_queries  # the position of the first query
    ends = _sum_clamped(*((x + (1 if is_causal else window_size)) for x in (start, num_keys)), num_keys)
    return ends - (
        0 if window_size is None else _sum_clamped(start - window_size + 1, num_keys - window_size + 1, num_keys)
    )


def _sum_clamped(start: int, stop: int, limit: int) -> int:
    """Sum the integers of [start, stop), each clamped to [0, limit]."""
    first, last = max(0, min(start, limit)), max(0, min(stop, limit))
    return (first + last - 1) * (last - first) // 2 + limit * (max(stop, limit) - max(start, limit))


def attention_flops(head_dim: int, num_heads: int, num_pairs: int, **options) -> int:
    """Count the FLOPs of the operator's forward pass: scores, composition of both, and weighted values.

    Args:
        head_dim: D.
        num_heads: H.
        num_pairs: Visible pairs of a query and a key in the whole batch (`visible_pairs`).
        **options: Fields of `ComposeOptions`.
    """
    check_integers(head_dim=head_dim, num_heads=num_heads)
    check_integers(least=0, num_pairs=num_pairs)
    composition = _pair_flops(num_heads, ComposeOptions(**options))
    return num_pairs * (2 * 2 * head_dim * num_heads + composition)


def compose_cost(dim: int, num_heads: int, num_queries: int, num_keys: int, **options) -> ComposeCost:
    """Count the parameters and forward FLOPs that composition adds to one layer for one sequence without masking.

    Args:
        dim: Width C of the tokens.
        num_heads: H.
        num_queries: T.
        num_keys: S.
        **options: Fields of `ComposeOptions`.
    """
    check_integers(dim=dim, num_heads=num_heads)
    check_integers(least=0, num_queries=num_queries, num_keys=num_keys)
    chosen = ComposeOptions(**options)
    if not chosen.is_composed:
        return ComposeCost(0, 0)
    compositions, group_heads = len(chosen.compositions), chosen.group_heads(num_heads)
    width = 2 * chosen.rank * group_heads
    per_token = chosen.num_groups * (dim * width + width * width) + chosen.dynamic_gate * dim * num_heads
    tokens = {"query": num_queries, "key": num_keys}
    params = compositions * per_token * len(chosen.sides)
    flops = compositions * 2 * per_token * sum(tokens[side] for side in chosen.sides)
    if chosen.static_base:
        params += compositions * num_heads * group_heads
    return ComposeCost(params, flops + num_queries * num_keys * _pair_flops(num_heads, chosen))


def _pair_flops(num_heads: int, options: ComposeOptions) -> int:
    """Count the FLOPs of composing one pair."""
    if not options.is_composed:
        return 0
    group_heads = options.group_heads(num_heads)
    down_over_heads, up_over_ranks = group_heads > 1, options.rank > 1
    flops = len(options.sides) * 2 * options.rank * num_heads * (down_over_heads + up_over_ranks)
    flops += options.static_base * 2 * num_heads * group_heads * (group_heads > 1)
    return len(options.compositions) * flops
