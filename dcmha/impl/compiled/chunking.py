"""Splitting a call into blocks of queries with their visible keys."""

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
    """Whether a call is computed as one block."""
    return call.q.shape[-2] <= WHOLE_LENGTH


def list_blocks(call: AttentionCall, seed: Tensor | None) -> list[QueryBlock]:
    """Split a call into blocks of queries."""
    T = call.q.shape[-2]
    if is_one_block(call):
        return [_block(call, seed, 0, T)]
    return [_block(call, seed, start, min(start + CHUNK, T)) for start in range(0, T, CHUNK)]


def _block(call: AttentionCall, seed: Tensor | None, start: int, stop: int) -> QueryBlock:
    """Slice a call to the queries [start, stop) and their visible keys, and combine its masks."""
    T, S = call.q.shape[-2], call.k.shape[-2]
    first, last = key_range(start, stop, T, S, call.is_causal, call.window_size)
    queries, keys = slice(start, stop), slice(first, last)
    by_position = visible_keys(
        stop - start,
        last - first,
        is_causal=call.is_causal,
        window_size=call.window_size,
        device=call.q.device,
        query_offset=start + S - T,
        key_offset=first,
    )
    visible = both_visible(by_position, _slice_mask(call.visible, queries, keys))
    if call.document_ids is not None:
        visible = both_visible(visible, same_document(call.document_ids, queries, keys, T))
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
    """Slice compose weights to the tokens of a chunk."""
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
