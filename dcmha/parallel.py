"""Tensor parallelism over head groups (paper, section 3.2): each rank computes some of the groups.

Composition mixes heads only within a group, so it needs no communication: a rank computes the queries, keys, values and
compose weights of its own groups, and its summand of the output projection. This module defines which part of a layer
belongs to which rank; the training code distributes the parameters and sums the outputs.
"""

from dataclasses import replace
from typing import NamedTuple

from .attention import DCAttention
from .checks import check_integers


class ShardedDim(NamedTuple):
    """How a parameter is split over ranks.

    Attributes:
        dim: The axis that is split; None for a replicated parameter.
        parts: Relative sizes of the fused parts along the axis; a rank has its share of each part.
        is_summed: For a replicated parameter: whether the gradients of the ranks have to be summed.
    """

    dim: int | None = None
    parts: tuple[int, ...] = (1,)
    is_summed: bool = False


def split_heads(layer: DCAttention, ranks: int) -> dict[str, ShardedDim]:
    """Change a layer to compute the heads of one rank. Its parameters are not split here.

    Afterwards the layer expects the parameters of one rank, and the input of `proj` is [B, T, H D / ranks]. The layer's
    input needs a sum over ranks in the backward pass, its output projection one in the forward pass.

    Args:
        layer: The layer, changed in place.
        ranks: Number of ranks that share its head groups; its heads, if it composes nothing.

    Returns:
        How its parameters are split, by name; parameters without an entry are replicated. `parts` are in the order of
        the stored parameters, so that a rank's share has the order of the full parameter.

    Raises:
        ValueError: If the groups are not divisible by the ranks, or the layer has a norm over all heads.
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
