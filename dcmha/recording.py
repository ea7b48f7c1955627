"""Looking at what composition does: attention maps before and after it, and the composition itself, averaged.

Recording computes the maps by the reference, beside what the layer computes; layers that are not recorded pay nothing.
"""

# B batch, T query tokens, S key tokens, H heads, G head groups

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .attention import DCAttention
from .functional import split_mask
from .impl.call import Call
from .impl.masking import documents_of
from .impl.reference import AttentionMaps, attention_maps
from .weights import ComposeWeights


@dataclass
class Recorded:
    """One call of one layer.

    Attributes:
        maps: Scores and weights of every pair, before and after composition, float32.
        uncomposed_weights: What the weights would be without any composition: the softmax of `maps.scores` under the
            same mask.
        pre_composition: The pre-composition averaged over all pairs [H, H], from (rows) to (columns); None if off.
        post_composition: The same of the post-composition.
    """

    maps: AttentionMaps
    uncomposed_weights: Tensor
    pre_composition: Tensor | None
    post_composition: Tensor | None


@contextmanager
def record_attention(model: nn.Module) -> Iterator[dict[str, Recorded]]:
    """Record the last call of every `DCAttention` of a model, by name, while the context is open.

        with torch.no_grad(), record_attention(model) as recorded:
            model(x)
        recorded["blocks.0.attn"].maps.composed_weights      # [B, H, T, T]

    The model computes what it always does; compiled ones run eagerly while the context is open.

    Raises:
        ValueError: If the model has no `DCAttention`, or is being recorded already.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, DCAttention)}
    if not layers:
        raise ValueError(f"{type(model).__name__} has no DCAttention to record.")
    if any("attend" in vars(layer) for layer in layers.values()):
        raise ValueError(f"{type(model).__name__} is being recorded already.")
    recorded: dict[str, Recorded] = {}
    for name, layer in layers.items():
        layer.attend = _recording(layer, name, recorded)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield recorded
    finally:
        for layer in layers.values():
            del layer.attend


def _recording(layer: DCAttention, name: str, recorded: dict[str, Recorded]):
    attend = layer.attend

    def record(q, k, v, pre, post, attn_mask, documents=None, is_causal=False, window=None) -> Tensor:
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            visible, bias = split_mask(attn_mask, q, k)
            q32, k32 = q.float(), k.float()
            bias = None if bias is None else bias.float()
            wide = (weights if weights is None else weights.map(Tensor.float) for weights in (pre, post))
            options = (is_causal, window, layer.scale, 0.0, layer.num_groups)
            ranges = None if documents is None else documents_of(documents)
            call = Call(q32, k32, v, *wide, visible, bias, ranges, *options)
            maps = attention_maps(call)
            uncomposed = attention_maps(call._replace(pre=None, post=None)).weights
            means = (mean_composition(w, layer.num_heads, layer.num_groups) for w in (pre, post))
            recorded[name] = Recorded(maps, uncomposed, *means)
        return attend(q, k, v, pre, post, attn_mask, documents, is_causal=is_causal, window=window)

    return record


def mean_composition(weights: ComposeWeights | None, num_heads: int, num_groups: int) -> Tensor | None:
    """Average a composition over the batch and all pairs: I + base + mean over queries of Mq + mean over keys of Mk.

    Returns:
        [H, H], row: old head, column: new head, zero between groups; None for no composition.
    """
    if weights is None:
        return None
    query, key, base = weights.map(Tensor.float)
    device = next(w.device for w in (*query, *key, base) if w is not None)
    total = torch.eye(num_heads, device=device)
    group = torch.arange(num_heads, device=device) // (num_heads // num_groups)
    same = group[:, None] == group[None, :]
    for down, up, gate in (query, key):
        if down is not None:
            total = total + same * torch.einsum("btrh,btrg->hg", down, up) / (down.shape[0] * down.shape[1])
        if gate is not None:
            total = total + gate.mean((0, 1)).diag()
    return total if base is None else total + torch.block_diag(*base)
