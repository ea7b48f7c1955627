"""The weights of single heads: what a head looks for (QK) and what it writes (OV), whatever layer it is in."""

# H heads, D head dim, C model width

from typing import NamedTuple

from torch import Tensor, nn

from ..checks import check_module, is_integer
from ..layer import ComposedAttentionBase

TIMM = {  # its attention whose weights lie head after head, queries, keys and values apart
    *("timm.layers.attention.Attention", "timm.layers.attention.AttentionRope"),
    *("timm.layers.attention_pool.AttentionPoolLatent", "timm.models.beit.Attention"),
    *("timm.models.eva.EvaAttention", "timm.models.swin_transformer.WindowAttention"),
}


class HeadWeights(NamedTuple):
    """The four matrices of each head of a layer, biases and norms left out.

    Attributes:
        query: [H, D, C], from the tokens that look.
        key: [H, D, C'], from those that are looked at (C' is C but for cross-attention).
        value: [H, D, C'].
        output: [H, C, D].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Find the attention layers of a model, composed or plain, by name: those of this package, and of timm in `TIMM`.

    Raises:
        TypeError: If `model` is not a module.
        ValueError: If there is none.
    """
    check_module(model=model)
    layers = {name: module for name, module in model.named_modules() if _has_heads(module)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layers whose heads are known.")
    return layers


def head_weights(layer: nn.Module) -> HeadWeights:
    """Take the weights of a layer apart by heads; keys and values that heads share are repeated."""
    heads = layer.num_heads
    query, key, value = (_by_heads(part, heads, layer.proj.in_features // heads) for part in _projections(layer))
    return HeadWeights(query, key, value, layer.proj.weight.unflatten(1, (heads, -1)).transpose(0, 1))


def head_outputs(layer: nn.Module, x: Tensor, head: int) -> Tensor:
    """Compute what a head writes for tokens each of which it looks at alone: x W_V W_O, biases left out.

    Args:
        layer: An attention layer, as `attention_layers` finds them.
        x: Tokens as the layer takes them [N, C'].
        head: Which of its heads.

    Returns:
        [N, C].

    Raises:
        ValueError: If the layer has no such head, or takes tokens of another width.
    """
    weights = head_weights(layer)
    heads, _, width = weights.value.shape
    if not is_integer(head) or not 0 <= head < heads:
        raise ValueError(f"head={head!r}; expected 0 to {heads - 1}.")
    if x.shape[-1] != width:
        raise ValueError(f"x has {x.shape[-1]} channels; expected {width}.")
    return x @ weights.value[head].mT @ weights.output[head].mT


def _has_heads(module: nn.Module) -> bool:
    """Tell whether the rows of a layer's projections lie as `_projections` reads them."""
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
    """[heads that share D, width] to [H, D, width]."""
    parts = weight.unflatten(0, (-1, head_dim))
    return parts.repeat_interleave(heads // len(parts), 0) if len(parts) != heads else parts
