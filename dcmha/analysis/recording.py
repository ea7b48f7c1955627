"""Looking at what composition does: attention maps before and after it, and the weights that compose them.

Recording computes the maps by the reference, beside what the layer computes; layers that are not recorded pay nothing.
"""

# B batch, T query tokens, S key tokens, H heads, G head groups

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..checks import check_module
from ..functional import split_mask
from ..impl.call import AttentionCall
from ..impl.masking import documents_of
from ..impl.reference import AttentionMaps, attention_maps
from ..layer import ComposedAttentionBase
from ..weights import ComposeWeights
from .breakdown import Breakdown, break_down
from .mixing import mean_composition


@dataclass
class Recorded:
    """One call of one layer.

    Attributes:
        maps: Scores and weights of every pair, before and after composition, float32.
        uncomposed_weights: What the weights would be without any composition: the softmax of `maps.scores` under the
            same mask.
        pre: The weights of the pre-composition, of every token, float32; None if it is off.
        post: The same of the post-composition.
        num_groups: Groups of heads that compose among themselves.
    """

    maps: AttentionMaps
    uncomposed_weights: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    num_groups: int

    @property
    def pre_composition(self) -> Tensor | None:
        """The pre-composition averaged over all pairs [H, H], from (rows) to (columns); None if it is off."""
        return None if self.pre is None else mean_composition(self.pre, self.maps.scores.shape[1], self.num_groups)

    @property
    def post_composition(self) -> Tensor | None:
        """The same of the post-composition."""
        return None if self.post is None else mean_composition(self.post, self.maps.scores.shape[1], self.num_groups)

    def breakdown(self, composition: str, query: int, key: int, batch: int = 0) -> Breakdown:
        """Break the composition of one pair into its terms (equation 7, figure 7).

        Args:
            composition: "pre" (of scores) or "post" (of weights).
            query: Position of the token that looks; -1 is the last.
            key: Position of the token that it looks at.
            batch: Which sequence.

        Raises:
            ValueError: If there is no such composition or position.
        """
        composed = {"pre": (self.maps.scores, self.pre), "post": (self.maps.weights, self.post)}
        if composition not in composed:
            raise ValueError(f"composition={composition!r}; expected 'pre', 'post'.")
        before, weights = composed[composition]
        if weights is None:
            raise ValueError(f"composition={composition!r}, which this layer does not have.")
        return break_down(before, weights, self.num_groups, batch=batch, query=query, key=key)


@contextmanager
def record_attention(
    model: nn.Module,
    layers: Iterable[str] | None = None,
    keep: Callable[[Recorded], Any] | None = None,
) -> Iterator[dict[str, Any]]:
    """Record the last call of each `ComposedAttentionBase`, such as `DCAttention`, by name, while the context is open.

        with torch.no_grad(), record_attention(model) as recorded:
            model(x)
        recorded["blocks.0.attn"].maps.composed_weights      # [B, H, T, T]

    The model computes what it always does; compiled ones run eagerly while the context is open. A layer takes about
    8 B H T S floats while it is recorded, and 5 of them stay; with `keep` stays what that returns.

    Args:
        model: What is called while the context is open.
        layers: Names of those to record; all if None.
        keep: Makes of a recorded call what is to be kept; all of it is if None.

    Raises:
        TypeError: If the model is no module.
        ValueError: If the model has no such layer, or is being recorded already.
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
        raise ValueError(f"{type(model).__name__} is being recorded already.")
    recorded: dict[str, Any] = {}

    def see(name: str, one: Recorded) -> None:
        recorded[name] = one if keep is None else keep(one)

    for name in chosen:
        found[name].attend = _recording(found[name], name, see)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield recorded
    finally:
        for name in chosen:
            del found[name].attend


def _recording(layer: ComposedAttentionBase, name: str, see: Callable[[str, Recorded], None]) -> Callable[..., Tensor]:
    attend = layer.attend

    def record(q, k, v, pre, post, attn_mask, documents=None, is_causal=False, window=None) -> Tensor:
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            visible, bias = split_mask(attn_mask, q, k)
            q32, k32 = q.float(), k.float()
            bias = None if bias is None else bias.float()
            pre32, post32 = (weights if weights is None else weights.map(Tensor.float) for weights in (pre, post))
            options = (is_causal, window, layer.scale, 0.0, layer.num_groups)
            ranges = None if documents is None else documents_of(documents)
            call = AttentionCall(q32, k32, v, pre32, post32, visible, bias, ranges, *options)
            maps = attention_maps(call)
            uncomposed = attention_maps(call._replace(pre=None, post=None)).weights
            see(name, Recorded(maps, uncomposed, pre32, post32, layer.num_groups))
        return attend(q, k, v, pre, post, attn_mask, documents, is_causal=is_causal, window=window)

    return record
