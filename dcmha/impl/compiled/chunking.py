"""How a call is cut into blocks of queries, each with the keys that it may see."""

# B batch, T query tokens, S key tokens, H heads

import torch
from torch import Tensor

from ...weights import ComposeWeights
from ..call import AttentionCall
from ..masking import both_visible, key_range, same_document, visible_keys
from .blocks import QueryBlock

WHOLE_LENGTH = 256  # up to this many queries: one block and no recompute
CHUNK = 128


def is_one_block(call: AttentionCall) -> bool:
    """Tell whether a call is not cut."""
    return call.q.shape[-2] <= WHOLE_LENGTH


def list_blocks(call: AttentionCall, seed: Tensor | None) -> list[QueryBlock]:
    """Cut a call into blocks of queries."""
    T = call.q.shape[-2]
    if is_one_block(call):
        return [_block(call, seed, 0, T)]
    return [_block(call, seed, start, min(start + CHUNK, T)) for start in range(0, T, CHUNK)]


def _block(call: AttentionCall, seed: Tensor | None, start: int, stop: int) -> QueryBlock:
    """Cut a call to the queries [start, stop) and the keys they may see, its masks made one."""
    T, S = call.q.shape[-2], call.k.shape[-2]
    first, last = key_range(start, stop, T, S, call.is_causal, call.window)
    queries, keys = slice(start, stop), slice(first, last)
    by_position = visible_keys(
        stop - start,
        last - first,
        is_causal=call.is_causal,
        window=call.window,
        device=call.q.device,
        query_offset=start + S - T,
        key_offset=first,
    )
    visible = both_visible(by_position, _slice_mask(call.visible, queries, keys))
    if call.documents is not None:
        visible = both_visible(visible, same_document(call.documents, queries, keys, T))
    return QueryBlock(
        q=call.q[:, :, queries],
        k=call.k[:, :, keys],
        v=call.v[:, :, keys],
        pre=_slice_weights(call.pre, queries, keys),
        post=_slice_weights(call.post, queries, keys),
        visible=visible,
        bias=_slice_mask(call.bias, queries, keys),
        scale=call.scale,
        num_groups=call.num_groups,
        has_open_keys=stop - start < S,
        may_be_empty=call.visible is not None or T > S,
        dropout_p=call.dropout_p,
        seed=None if seed is None else torch.cat([seed, torch.tensor([start, first], device=seed.device)]),
    )


def _slice_weights(weights: ComposeWeights | None, queries: slice, keys: slice) -> ComposeWeights | None:
    """Take the weights of a chunk's tokens."""
    if weights is None:
        return None
    query, key = weights.query.map(lambda w: w[:, queries]), weights.key.map(lambda w: w[:, keys])
    return ComposeWeights(query, key, weights.base)


def _slice_mask(mask: Tensor | None, queries: slice, keys: slice) -> Tensor | None:
    """Slice a mask that may be broadcast along queries or keys."""
    if mask is None:
        return None
    mask = mask if mask.shape[-2] == 1 else mask[..., queries, :]
    return mask if mask.shape[-1] == 1 else mask[..., keys]
