"""Tensor parallelism over head groups (paper, section 3.2): each rank has some groups, and composes them by itself.

Composition mixes heads within a group alone, so that it needs no communication: a rank makes the queries, keys, values
and compose weights of its own groups, and its share of the output projection's sum. This says what of a layer is whose;
who trains places the parameters so, and adds up what the ranks make.
"""

from dataclasses import replace
from typing import NamedTuple

from .attention import DCAttention
from .checks import check_integers


class ShardedDim(NamedTuple):
    """How a parameter is split over ranks.

    Attributes:
        dim: The axis that is split; None for a parameter that every rank has.
        parts: Relative sizes of the fused parts that the axis holds, one after the other; a rank has its share of each.
        is_summed: Of a parameter that every rank has: a rank's gradient is its share of a sum.
    """

    dim: int | None = None
    parts: tuple[int, ...] = (1,)
    is_summed: bool = False


def split_heads(layer: DCAttention, ranks: int) -> dict[str, ShardedDim]:
    """Make a layer attend with one rank's heads; its parameters stay as they are until somebody splits them.

    Afterwards the layer takes parameters of a rank's share, and before `proj` has [B, T, H D / ranks]. What goes into
    the layer, and its output projection, need one sum over the ranks each, in the backward and the forward pass.

    Args:
        layer: The layer, changed in place.
        ranks: Ranks that share its groups of heads; its heads, if it composes nothing.

    Returns:
        How its parameters are split, by name; each rank has those that are not named. `parts` are in the order of the
        stored parameters, so that a rank's share is ordered as the whole.

    Raises:
        ValueError: If the groups do not split, or the layer has a norm over all heads.
    """
    check_integers(ranks=ranks)
    groups, what = (layer.num_groups, "num_groups") if layer.compose is not None else (layer.num_heads, "num_heads")
    if groups % ranks:
        raise ValueError(f"{what}={groups} cannot be split over {ranks} ranks: it must be a multiple of them.")
    if layer.num_kv_heads % ranks:
        got = f"num_kv_heads={layer.num_kv_heads}"
        raise ValueError(f"{got} cannot be split over {ranks} ranks: it must be a multiple of them.")
    if any(True for _ in layer.norm.parameters()):
        raise ValueError("scale_norm=True: a norm over all heads cannot be split over ranks.")
    of_qkv = ShardedDim(0, parts=(layer.num_heads, layer.num_kv_heads, layer.num_kv_heads))
    splits = {"qkv.weight": of_qkv, "qkv.bias": of_qkv, "proj.weight": ShardedDim(1)}
    splits |= {"gate.weight": ShardedDim(0), "gate.bias": ShardedDim(0)}
    for norm in ("q_norm", "k_norm"):
        splits |= {f"{norm}.{name}": ShardedDim(is_summed=True) for name, _ in getattr(layer, norm).named_parameters()}
    layer.num_heads //= ranks
    layer.num_kv_heads //= ranks
    layer.attn_dim //= ranks
    if layer.compose is not None:
        roles = len(layer.compose.roles)
        splits |= {f"compose.{name}": ShardedDim(0, parts=(1,) * roles) for name in ("hidden", "project", "gate")}
        splits["compose.base"] = ShardedDim(1)
        layer.compose.num_heads = layer.num_heads
        layer.options = layer.compose.options = replace(layer.options, num_groups=groups // ranks)
    present = dict(layer.named_parameters())
    return {name: split for name, split in splits.items() if name in present}
