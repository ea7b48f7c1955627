"""Weights of single heads (QK and OV circuits) for all supported attention layers."""

# H heads, D head dim, C model width

from typing import NamedTuple

from torch import Tensor, nn

from ..checks import check_module, is_integer
from ..layer import ComposedAttentionBase

TIMM = {  # timm's attention classes whose weights are ordered by q, k, v and then by head
    *("timm.layers.attention.Attention", "timm.layers.attention.AttentionRope"),
    *("timm.layers.attention_pool.AttentionPoolLatent", "timm.models.beit.Attention"),
    *("timm.models.eva.EvaAttention", "timm.models.swin_transformer.WindowAttention"),
}


class HeadWeights(NamedTuple):
    """The four matrices of each head of a layer, without biases and norms.

    Attributes:
        query: [H, D, C].
        key: [H, D, C'] (C' is the context's width in cross-attention, otherwise C).
        value: [H, D, C'].
        output: [H, C, D].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the attention layers of a model by name, composed or plain: those of this package and timm's in `TIMM`.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If there are none.
    """
    check_module(model=model)
    layers = {name: module for name, module in model.named_modules() if _has_heads(module)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no supported attention layers.")
    return layers


def head_weights(layer: nn.Module) -> HeadWeights:
    """Split the weights of a layer by head; shared keys and values are repeated."""
    heads = layer.num_heads
    query, key, value = (_by_heads(part, heads, layer.proj.in_features // heads) for part in _projections(layer))
    return HeadWeights(query, key, value, layer.proj.weight.unflatten(1, (heads, -1)).transpose(0, 1))


def head_outputs(layer: nn.Module, x: Tensor, head: int) -> Tensor:
    """Compute the output of a head for tokens that it attends to exclusively: x W_V W_O, without biases.

    Args:
        layer: An attention layer from `attention_layers`.
        x: Inputs of the layer [N, C'].
        head: Index of the head.

    Returns:
        [N, C].

    Raises:
        ValueError: If the head does not exist, or the width of `x` does not match.
    """
    weights = head_weights(layer)
    heads, _, width = weights.value.shape
    if not is_integer(head) or not 0 <= head < heads:
        raise ValueError(f"head={head!r}; expected 0 to {heads - 1}.")
    if x.shape[-1] != width:
        raise ValueError(f"x has {x.shape[-1]} channels; expected {width}.")
    return x @ weights.value[head].mT @ weights.output[head].mT


def _has_heads(module: nn.Module) -> bool:
    """Whether the projections of a layer have the layout that `_projections` expects."""
    if isinstance(module, ComposedAttentionBase):
        return True
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(module).__mro__}
    return bool(names & TIMM) and (hasattr(module, "qkv") or isinstance(getattr(module, "q", None), nn.Linear))


def _projections(layer: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return the weights of queries, keys and values, each [heads D, width]."""
    if getattr(layer, "qkv", None) is not None:
        rows = layer.qkv.weight.shape[0]
        queries = layer.proj.in_features
        return layer.qkv.weight.split([queries, (rows - queries) // 2, (rows - queries) // 2])
    if getattr(layer, "q_proj", None) is not None:
        return layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight
    return layer.q.weight, *layer.kv.weight.chunk(2)


def _by_heads(weight: Tensor, heads: int, head_dim: int) -> Tensor:
    """[key heads * D, width] to [H, D, width]."""
    parts = weight.unflatten(0, (-1, head_dim))
    return parts.repeat_interleave(heads // len(parts), 0) if len(parts) != heads else parts
