"""Composed attention whose memory grows with chunk x S, in the backward pass too: each chunk is computed again.

Chunks of queries, whose composition is broadcasts with sums over the heads: `torch.compile` fuses them into few
kernels, with dynamic shapes. It runs on any device; on CUDA its chunks are compiled, elsewhere if the caller compiles.
Sums over heads and the softmax are done in max(input dtype, float32).
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from functools import cache, partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..weights import ComposeWeights
from .call import Call, is_transformed
from .dropout import draw_seed, drop
from .masking import both_visible, key_range, masked_softmax, same_document, visible_keys

WHOLE_LENGTH = 256  # up to this many queries: one chunk and no recompute
CHUNK = 128


def attention(call: Call) -> Tensor:
    """Compute composed attention chunk by chunk: [B, H, T, D]."""
    q, T, S = call.q, call.q.shape[-2], call.k.shape[-2]
    may_be_empty = call.visible is not None or T > S
    is_plain_eager = not is_transformed() and not torch.compiler.is_compiling()
    block = _compiled_block() if q.is_cuda and is_plain_eager else _block
    seed = draw_seed(q.device) if call.dropout_p > 0.0 else None
    block = partial(block, may_be_empty=may_be_empty, seed=seed)
    if T <= WHOLE_LENGTH:
        return block(*_chunk(call, 0, T))
    pieces = [_chunk(call, start, min(start + CHUNK, T)) for start in range(0, T, CHUNK)]
    if not torch.is_grad_enabled() or is_transformed():  # transforms know no recomputing
        return torch.cat([block(*piece) for piece in pieces], dim=2)
    recomputed = partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([recomputed(*piece) for piece in pieces], dim=2)


def _chunk(call: Call, start: int, stop: int) -> tuple[Call, int, int]:
    """Cut a call to the queries [start, stop) and the keys they may see, its masks made one.

    Returns:
        The chunk's call, and the numbers of its first query and key.
    """
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
    chunk = call._replace(
        q=call.q[:, :, queries],
        k=call.k[:, :, keys],
        v=call.v[:, :, keys],
        pre=_slice_weights(call.pre, queries, keys),
        post=_slice_weights(call.post, queries, keys),
        visible=visible,
        bias=_slice_mask(call.bias, queries, keys),
        documents=None,
        is_causal=False,
        window=None,
    )
    return chunk, start, first


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


def _block(chunk: Call, first_query: int, first_key: int, *, may_be_empty: bool, seed: Tensor | None) -> Tensor:
    """Attend from one chunk of queries to the keys it can see; the seed is that of dropout."""
    compute_dtype = torch.promote_types(chunk.q.dtype, torch.float32)
    (B, H, T, D), (_, key_heads, S, _) = chunk.q.shape, chunk.k.shape
    queries = chunk.q.reshape(B, key_heads, H // key_heads * T, D)  # heads that share keys are rows of one product
    scores = (queries @ chunk.k.mT).view(B, H, T, S).to(compute_dtype) * chunk.scale
    if chunk.pre is not None:
        scores = _compose(scores, chunk.pre, chunk.num_groups)
    if chunk.bias is not None:
        scores = scores + chunk.bias
    weights = masked_softmax(scores, chunk.visible, may_be_empty=may_be_empty)
    if chunk.post is not None:
        weights = _compose(weights, chunk.post, chunk.num_groups)
    if seed is not None:
        weights = drop(weights, seed, chunk.dropout_p, first_query, first_key)
    out = weights.to(chunk.v.dtype).view(B, key_heads, H // key_heads * T, S) @ chunk.v
    return out.view(B, H, T, D)


@cache
def _compiled_block():
    """Compile the chunk once per process; dynamic shapes keep chunks of all sizes in one graph."""
    return torch.compile(_block, dynamic=True)


def _compose(a: Tensor, weights: ComposeWeights, num_groups: int) -> Tensor:
    """Compose with explicit broadcasts and sums over the heads, a form the compiler fuses (an einsum would not be)."""
    a_BGHTS = a.unflatten(1, (num_groups, -1))
    out = a_BGHTS
    if weights.base is not None:
        base = weights.base.to(a.dtype)  # [G, from, to]
        out = out + (a_BGHTS.unsqueeze(3) * base[:, :, :, None, None]).sum(2)
    for (down, up, gate), token_axis in ((weights.query, -1), (weights.key, -2)):
        if down is not None:
            down, up = (_by_head(w, num_groups, a.dtype) for w in (down, up))  # [B, R, G, H/G, T or S]
            for r in range(down.shape[1]):
                hidden = (a_BGHTS * down[:, r].unsqueeze(token_axis)).sum(2, keepdim=True)
                out = out + hidden * up[:, r].unsqueeze(token_axis)
        if gate is not None:
            out = out + a_BGHTS * _by_head(gate, num_groups, a.dtype).unsqueeze(token_axis)
    return out.flatten(1, 2)


def _by_head(weight: Tensor, num_groups: int, dtype: torch.dtype) -> Tensor:
    """Move the tokens of [B, T, ..., H] last and split the heads: [B, ..., G, H/G, T]."""
    return weight.to(dtype).movedim(1, -1).unflatten(-2, (num_groups, -1))
