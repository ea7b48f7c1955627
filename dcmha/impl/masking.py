"""Which keys a query may see, and a softmax that gives zeros where it may see none.

Positions are aligned to the last key: query i of T stands at position S - T + i, so decoding with a cache is the same
call.
"""

# B batch, T query tokens, S key tokens, H heads

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class Documents(NamedTuple):
    """Which tokens belong together: ranges of the keys' tokens, each [B, S], int32.

    Attributes:
        starts: First token of each token's document.
        stops: The token behind its last.
    """

    starts: Tensor
    stops: Tensor


def documents_of(numbers: Tensor | Documents) -> Documents:
    """Find the documents, runs of equal numbers [B, S], that tokens belong to; `Documents` stay, dense and in int32."""
    if isinstance(numbers, Documents):
        return Documents(*(x.int().contiguous() for x in numbers))
    places = torch.arange(numbers.shape[1], device=numbers.device).expand_as(numbers)
    is_same = numbers[:, 1:] == numbers[:, :-1]
    first, last = torch.zeros_like(places[:, :1]), torch.full_like(places[:, :1], numbers.shape[1])
    starts = torch.cat([first, torch.where(is_same, 0, places[:, 1:])], 1)
    stops = torch.cat([torch.where(is_same, numbers.shape[1], places[:, 1:]), last], 1)
    return Documents(starts.cummax(1).values.int(), stops.flip(1).cummin(1).values.flip(1).int())


def mask_of_documents(documents: Documents, T: int) -> Tensor:
    """Tell which keys are of the document of each query [B, 1, T, S]; remembered, so that layers share one mask."""
    starts = documents.starts
    block = slice(0, T), slice(0, starts.shape[1])
    if torch.compiler.is_compiling() or starts.is_inference():
        return same_document(documents, *block, T)
    masks = _known_masks.setdefault(starts, {})
    if T not in masks:
        masks[T] = same_document(documents, *block, T)
    return masks[T]


_known_masks = WeakTensorKeyDictionary()


def same_document(documents: Documents, queries: slice, keys: slice, T: int) -> Tensor:
    """Tell which of a block's keys are of the document of each of its queries: [B, 1, queries, keys]."""
    starts = documents.starts
    first = starts.shape[1] - T  # position of query 0
    of_queries = starts[:, first + queries.start : first + queries.stop]
    return (of_queries[:, :, None] == starts[:, None, keys])[:, None]


def visible_keys(
    num_queries: int,
    num_keys: int,
    *,
    is_causal: bool,
    window: int | None,
    device: torch.device,
    query_offset: int,
    key_offset: int = 0,
) -> Tensor | None:
    """Build the boolean causal and window mask of a block of queries and keys.

    Args:
        num_queries: Number of queries in the block.
        num_keys: Number of keys in the block.
        is_causal: Hide keys after the query's position.
        window: Number of keys a query sees, its own included (to each side without `is_causal`), or None.
        device: Where to make the mask.
        query_offset: Position of the block's first query on the key axis (S - T for the whole matrix).
        key_offset: Position of the block's first key.

    Returns:
        Boolean mask [num_queries, num_keys], True = visible, or None when nothing is hidden.
    """
    if not is_causal and window is None:
        return None
    query_position = torch.arange(num_queries, device=device)[:, None] + query_offset
    key_position = torch.arange(num_keys, device=device)[None, :] + key_offset
    distance = query_position - key_position
    visible = distance >= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        visible = visible & (distance < window)
        if not is_causal:
            visible = visible & (distance > -window)
    return visible


def key_range(start: int, stop: int, T: int, S: int, is_causal: bool, window: int | None) -> tuple[int, int]:
    """Bound the keys that queries [start, stop) may see; at least one key, so that no matrix is empty."""
    last = min(S, stop + S - T) if is_causal else S
    first = 0
    if window is not None:
        first = max(0, start + S - T - window + 1)
        last = min(last, stop + S - T - 1 + window)
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
    """Softmax over the last axis; a row with nothing visible gives zeros and zero gradients, never NaN.

    Args:
        scores: [B, H, T, S], any float dtype.
        visible: Boolean, broadcastable to `scores`, or None.
        may_be_empty: Whether a row may see no key at all. False saves the test.
    """
    if visible is None:
        return scores.softmax(-1)
    if not may_be_empty:
        return scores.masked_fill(~visible, -torch.inf).softmax(-1)
    empty = ~visible.any(-1, keepdim=True)
    weights = scores.masked_fill(~(visible | empty), -torch.inf).softmax(-1)
    return weights.masked_fill(empty, 0.0)
