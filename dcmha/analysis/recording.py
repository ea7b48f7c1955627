"""Recording attention maps before and after composition, and the compose weights.

The maps are computed by the reference in addition to the layer's own computation; other layers are not affected.
"""

# B batch, T query tokens, S key tokens, H heads, G head groups

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn

from ..checks import check_module
from ..impl.call import AttentionCall
from ..impl.checks import check_mask
from ..impl.masking import document_bounds, split_mask
from ..impl.reference import AttentionMaps, attention_maps
from ..layer import ComposedAttentionBase
from ..weights import ComposeWeights
from .breakdown import Breakdown, break_down
from .mixing import mean_composition


@dataclass
class Recorded:
    """Recorded call of one layer.

    Attributes:
        maps: Scores and attention weights of all pairs, before and after composition, float32.
        uncomposed_weights: Attention weights without any composition: the softmax of `maps.scores` under the same mask.
        pre: Compose weights of the pre-composition for all tokens, float32; None if disabled.
        post: Compose weights of the post-composition, likewise.
        num_groups: Head groups.
    """

    maps: AttentionMaps
    uncomposed_weights: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    num_groups: int

    @property
    def pre_composition(self) -> Tensor | None:
        """The pre-composition averaged over all pairs [H, H], from (rows) to (columns); None if disabled."""
        return None if self.pre is None else mean_composition(self.pre, self.maps.scores.shape[1], self.num_groups)

    @property
    def post_composition(self) -> Tensor | None:
        """The post-composition averaged over all pairs [H, H]; None if disabled."""
        return None if self.post is None else mean_composition(self.post, self.maps.scores.shape[1], self.num_groups)

    def breakdown(self, composition: str, query: int, key: int, batch: int = 0) -> Breakdown:
        """Break the composition of one pair into its terms (equation 7, figure 7).

        Args:
            composition: "pre" (of scores) or "post" (of weights).
            query: Position of the query; -1 is the last.
            key: Position of the key.
            batch: Index of the sequence.

        Raises:
            ValueError: If the composition is disabled or a position is out of range.
        """
        composed = {"pre": (self.maps.scores, self.pre), "post": (self.maps.weights, self.post)}
        if composition not in composed:
            raise ValueError(f"composition={composition!r}; expected 'pre', 'post'.")
        before, weights = composed[composition]
        if weights is None:
            raise ValueError(f"composition={composition!r} is disabled in this layer.")
        return break_down(before, weights, self.num_groups, batch=batch, query=query, key=key)


Kept = TypeVar("Kept")


@overload
def record_attention(
    model: nn.Module, layers: Iterable[str] | None = None, keep: None = None
) -> AbstractContextManager[dict[str, Recorded]]: ...
@overload
def record_attention(
    model: nn.Module, layers: Iterable[str] | None = None, *, keep: Callable[[Recorded], Kept]
) -> AbstractContextManager[dict[str, Kept]]: ...
@contextmanager
def record_attention(
    model: nn.Module,
    layers: Iterable[str] | None = None,
    keep: Callable[[Recorded], Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Record the last call of each composed layer, such as `DCAttention`, while the context is active.

        with torch.no_grad(), record_attention(model) as recorded:
            model(x)
        recorded["blocks.0.attn"].maps.composed_weights      # [B, H, T, T]

    The model's outputs are unchanged; compiled models run eagerly within the context. Recording a layer takes about
    8 B H T S floats, of which 5 B H T S are retained; with `keep`, its result is retained instead.

    Args:
        model: The model that is called within the context.
        layers: Names of the layers to record; all if None.
        keep: Function of a recorded call whose result is retained; the call itself if None.

    Raises:
        TypeError: If the model is not a module.
        ValueError: If the model has no such layer, or is already being recorded.
    """
    check_module(model=model)
    found = {name: module for name, module in model.named_modules() if isinstance(module, ComposedAttentionBase)}
    if not found:
        raise ValueError(f"{type(model).__name__} has no DCAttention or DCCrossAttention to record.")
    chosen = list(found) if layers is None else list(dict.fromkeys(layers))
    unknown = [name for name in chosen if name not in found]
    if unknown:
        raise ValueError(f"layers={unknown} are not in the model; expected {', '.join(found)}.")
    if any("attend" in vars(layer) for layer in found.values()):
        raise ValueError(f"{type(model).__name__} is already being recorded.")
    recorded: dict[str, Any] = {}

    def keep_call(name: str, one: Recorded) -> None:
        recorded[name] = one if keep is None else keep(one)

    for name in chosen:
        found[name].attend = _recording(found[name], name, keep_call)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield recorded
    finally:
        for name in chosen:
            del found[name].attend


def _recording(
    layer: ComposedAttentionBase, name: str, keep_call: Callable[[str, Recorded], None]
) -> Callable[..., Tensor]:
    attend = layer.attend

    def record(q, k, v, pre, post, attn_mask, document_ids=None, is_causal=False, window_size=None) -> Tensor:
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            check_mask(attn_mask, (*q.shape[:3], k.shape[2]), q.device)
            visible, bias = split_mask(attn_mask, q.dtype)
            q32, k32 = q.float(), k.float()
            bias = None if bias is None else bias.float()
            pre32, post32 = (weights if weights is None else weights.map(Tensor.float) for weights in (pre, post))
            options = (is_causal, window_size, layer.scale, 0.0, layer.num_groups)
            ranges = None if document_ids is None else document_bounds(document_ids)
            call = AttentionCall(q32, k32, v, pre32, post32, visible, bias, ranges, *options)
            maps = attention_maps(call)
            uncomposed = attention_maps(call._replace(pre=None, post=None)).weights
            keep_call(name, Recorded(maps, uncomposed, pre32, post32, layer.num_groups))
        return attend(q, k, v, pre, post, attn_mask, document_ids, is_causal=is_causal, window_size=window_size)

    return record
