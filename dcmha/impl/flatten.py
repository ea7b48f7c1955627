"""An `AttentionCall` as flat tensors: lists of its tensors, and the arguments of PyTorch operators.

All operators of the package take the arguments of `SCHEMA`, in the order of `flatten`.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim

from collections.abc import Sequence

import torch
from torch import Tensor

from ..weights import ComposeWeights, SideWeights
from .call import AttentionCall
from .masking import DocumentBounds

PARTS = (*(f"{side}_{part}" for side in ("query", "key") for part in SideWeights._fields), "base")
WEIGHTS = tuple(f"{composition}_{part}" for composition in ("pre", "post") for part in PARTS)
TENSORS = ("q", "k", "v", *WEIGHTS, "bias")  # differentiable
CONSTANTS = ("visible", "starts", "stops", "seed")  # tensors without a gradient
OPTIONS = AttentionCall._fields[-5:]  # is_causal, window_size, scale, dropout_p, num_groups
SCHEMA = (
    f"Tensor q, Tensor k, Tensor v, {', '.join(f'Tensor? {name}' for name in (*TENSORS[3:], *CONSTANTS))}, "
    "bool is_causal, SymInt? window_size, float scale, float dropout_p, SymInt num_groups"
)


def flat_weights(weights: ComposeWeights | None) -> list[Tensor | None]:
    """Return the weights of a composition in the order of `PARTS`."""
    return [None] * len(PARTS) if weights is None else [*weights.query, *weights.key, weights.base]


def weights_from(flat: Sequence[Tensor | None]) -> ComposeWeights | None:
    """Inverse of `flat_weights`."""
    if all(w is None for w in flat):
        return None
    return ComposeWeights(SideWeights(*flat[:3]), SideWeights(*flat[3:6]), flat[6])


def tensors_of(call: AttentionCall) -> list[Tensor | None]:
    """Return the differentiable tensors of a call (or a part of one), in the order of `TENSORS`."""
    return [call.q, call.k, call.v, *flat_weights(call.pre), *flat_weights(call.post), call.bias]


def with_tensors(call: AttentionCall, tensors: Sequence[Tensor | None]) -> AttentionCall:
    """Replace the tensors returned by `tensors_of`."""
    q, k, v, pre, post, bias = _with_compositions(tensors)
    return call._replace(q=q, k=k, v=v, pre=pre, post=post, bias=bias)


def _with_compositions(tensors: Sequence[Tensor | None]) -> tuple:
    """Join the weights in a list in the order of `TENSORS` to both compositions: q, k, v, pre, post, bias."""
    q, k, v, *weights, bias = tensors
    return q, k, v, weights_from(weights[: len(PARTS)]), weights_from(weights[len(PARTS) :]), bias


def flatten(call: AttentionCall, seed: Tensor | None) -> tuple:
    """Return the arguments of `SCHEMA`; `seed` is the dropout seed, None without dropout."""
    return *tensors_of(call), call.visible, *call.document_bounds, seed, *call[-len(OPTIONS) :]


def unflatten(arguments: Sequence) -> tuple[AttentionCall, Tensor | None]:
    """Inverse of `flatten`: the call and the dropout seed."""
    tensors, rest = arguments[: len(TENSORS)], arguments[len(TENSORS) :]
    q, k, v, pre, post, bias = _with_compositions(tensors)
    visible, starts, stops, seed, *options = rest
    document_ids = None if starts is None else DocumentBounds(starts, stops)
    return AttentionCall(q, k, v, pre, post, visible, bias, document_ids, *options), seed


def with_one_mask(call: AttentionCall) -> AttentionCall:
    """Merge both masks of a call into one with four axes: `visible`, or `bias` with -inf for hidden keys."""
    mask = call.mask
    if mask is None or mask.dtype == torch.bool:
        return call._replace(visible=mask)
    return call._replace(visible=None, bias=mask)
