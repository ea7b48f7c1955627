"""Visibility of keys, and a softmax that returns zeros for queries without visible keys.

Positions are aligned to the last key: query i of T is at position S - T + i, so decoding with a cache is the same call.
"""

# B batch, T query tokens, S key tokens, H heads

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class DocumentBounds(NamedTuple):
    """Range of tokens of each key's document, each [B, S], int32.

    Attributes:
        starts: First token of the document.
        stops: End of the document, exclusive.
    """

    starts: Tensor
    stops: Tensor


def document_bounds(numbers: Tensor | DocumentBounds) -> DocumentBounds:
    """Compute the bounds of documents, runs of equal ids [B, S]. `DocumentBounds` are returned dense and in int32."""
    if isinstance(numbers, DocumentBounds):
        return DocumentBounds(*(x.int().contiguous() for x in numbers))
    places = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    is_same = numbers[:, 1:] == numbers[:, :-1]
    first, last = torch.zeros_like(places[:, :1]), torch.full_like(places[:, :1], numbers.shape[1])
    starts = torch.cat([first, torch.where(is_same, 0, places[:, 1:])], 1)
    stops = torch.cat([torch.where(is_same, numbers.shape[1], places[:, 1:]), last], 1)
    return DocumentBounds(starts.cummax(1).values.int(), stops.flip(1).cummin(1).values.flip(1).int())


def mask_of_documents(document_ids: DocumentBounds, T: int) -> Tensor:
    """Mask of the keys in each query's document [B, 1, T, S]; cached, so that layers share one mask."""
    starts = document_ids.starts
    block = slice(0, T), slice(0, starts.shape[1])
    if torch.compiler.is_compiling() or starts.is_inference():
        return same_document(document_ids, *block, T)
    masks = _known_masks.setdefault(starts, {})
    if T not in masks:
        masks[T] = same_document(document_ids, *block, T)
    return masks[T]


_known_masks = WeakTensorKeyDictionary()


def same_document(document_ids: DocumentBounds, queries: slice, keys: slice, T: int) -> Tensor:
    """Mask of a block's keys in the document of each of its queries: [B, 1, queries, keys]."""
    starts = document_ids.starts
    first = starts.shape[1] - T  # position of query 0
    of_queries = starts[:, first + queries.start : first + queries.stop]
    return (of_queries[:, :, None] == starts[:, None, keys])[:, None]


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    is_causal: bool,
    window_size: int | None,
    device: torch.device,
    query_offset: int,
    key_offset: int = 0,
) -> Tensor | None:
    """Build the boolean causal and window mask of a block of queries and keys.

    Args:
        num_queries: Number of queries in the block.
        num_keys: Number of keys in the block.
        is_causal: Hide keys after the query's position.
        window_size: As in `composed_attention`.
        device: Device of the mask.
        query_offset: Position of the block's first query on the key axis (S - T for the whole matrix).
        key_offset: Position of the block's first key.

    Returns:
        Boolean mask [num_queries, num_keys], True = visible, or None when nothing is hidden.
    """
    if not is_causal and window_size is None:
        return None
    query_position = torch.arange(num_queries, device=device)[:, None] + query_offset
    key_position = torch.arange(num_keys, device=device)[None, :] + key_offset
    distance = query_position - key_position
    visible = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window_size is not None:
        visible = visible & (distance < window_size)
        if not is_causal:
            visible = visible & (distance > -window_size)
    return visible


def key_range(start: int, stop: int, T: int, S: int, is_causal: bool, window_size: int | None) -> tuple[int, int]:
    """Return the range of keys visible to queries [start, stop); at least one key, so that no matrix is empty."""
    last = min(S, stop + S - T) if is_causal else S
    first = 0
    if window_size is not None:
        first = max(0, start + S - T - window_size + 1)
        last = min(last, stop + S - T - 1 + window_size)
    last = max(last, min(S, 1))
    return min(first, max(last - 1, 0)), last


def both_visible(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Combine two boolean masks by AND; None hides nothing."""
    if a is None or b is None:
        return b if a is None else a
    return a & b


def combine_masks(attn_mask: Tensor | None, visible: Tensor | None) -> Tensor | None:
    """Combine a user's mask, boolean or floating, with a boolean one by AND."""
    if attn_mask is None or visible is None:
        return visible if attn_mask is None else attn_mask
    return attn_mask & visible if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~visible, -torch.inf)


def masked_softmax(scores: Tensor, visible: Tensor | None, *, may_be_empty: bool) -> Tensor:
    """Softmax over the last axis; a row without visible keys gives zeros and zero gradients, not NaN.

    Args:
        scores: [B, H, T, S], any float dtype.
        visible: Boolean, broadcastable to `scores`, or None.
        may_be_empty: Whether a row may have no visible key. False skips the check.
    """
    if visible is None:
        return scores.softmax(-1)
    if not may_be_empty:
        return scores.masked_fill(~visible, -torch.inf).softmax(-1)
    empty = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~(visible | empty), -torch.inf).softmax(-1)
    return weights.masked_fill(empty, 0.0)


def split_mask(attn_mask: Tensor | None, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Split a checked mask into a boolean visibility (False also for -inf) and a finite bias of a dtype."""
    if attn_mask is None:
        return None, None
    if not (torch.compiler.is_compiling() or attn_mask.requires_grad):
        attn_mask = _unexpanded(attn_mask)
    while attn_mask.dim() < 2:
        attn_mask = attn_mask.unsqueeze(0)
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    attn_mask = attn_mask.to(dtype)  # before the split: a value beyond the dtype's range becomes -inf
    visible = attn_mask != -torch.inf
    return visible, attn_mask.masked_fill(~visible, 0.0)


def _unexpanded(x: Tensor) -> Tensor:
    """Keep one slice along each expanded axis, so that a copy of a mask is not larger than the mask itself."""
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(axis, 0, 1)
    return x
