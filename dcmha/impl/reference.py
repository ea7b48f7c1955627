"""Dense reference of composed attention as in the paper (equations 4 and 7); defines the correct result.

Computed in float32 (float64 for float64 inputs): scores and the terms of a composition, which cancel, would lose
several percent if they were rounded to 16 bits.

DCMHA, ICML 2024, https://arxiv.org/abs/2405.08553
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..weights import ComposeWeights, SideWeights
from .call import AttentionCall, compute_dtype
from .dropout import draw_seed, drop
from .masking import both_visible, mask_of_documents, masked_softmax, visible_keys

BRANCHES = (
    "base",
    "query projection",
    "query gate",
    "key projection",
    "key gate",
)  # the paper's o_qp, o_qg, o_kp, o_kg


def compose(a: Tensor, weights: ComposeWeights, num_groups: int = 1) -> Tensor:
    """Mix the heads of every query-key pair (equation 7 with the identity in place of W_b, section 3.1).

    Args:
        a: Scores or weights [B, H, T, S].
        weights: One composition; branches that are None add nothing.
        num_groups: Head groups G; only heads of the same group mix (section 3.2).

    Returns:
        a + a @ base + sum_r (a . down_r) up_r + a * gate, for queries and keys, [B, H, T, S].
    """
    out = a
    for _, term in added_terms(a, weights, num_groups):
        out = out + term
    return out


def added_terms(a: Tensor, weights: ComposeWeights, num_groups: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Yield the terms that a composition adds to `a`, with their names from `BRANCHES`; arguments as in `compose`."""
    grouped = a.unflatten(1, (num_groups, -1))  # [B, G, H/G, T, S]
    if weights.base is not None:
        yield "base", torch.einsum("bghts,ghk->bgkts", grouped, weights.base).flatten(1, 2)
    for name, token, side in (("query", "t", weights.query), ("key", "s", weights.key)):
        if side.down is not None:
            up = side.up.unflatten(-1, (num_groups, -1))
            inner = inner_values(a, side, token, num_groups)
            yield f"{name} projection", torch.einsum(f"bgrts,b{token}rgh->bghts", inner, up).flatten(1, 2)
        if side.gate is not None:
            yield f"{name} gate", a * side.gate.transpose(1, 2).unsqueeze(-1 if token == "t" else -2)


def inner_values(a: Tensor, side: SideWeights, token: Literal["t", "s"], num_groups: int = 1) -> Tensor:
    """Contract the heads of `a` [B, H, T, S] with the down projection of queries ("t") or keys ("s"): [B, G, R, T,
    S]."""
    grouped, down = a.unflatten(1, (num_groups, -1)), side.down.unflatten(-1, (num_groups, -1))
    return torch.einsum(f"bghts,b{token}rgh->bgrts", grouped, down)


class AttentionMaps(NamedTuple):
    """Attention maps of all pairs, each [B, H, T, S], float32 (float64 for float64 inputs).

    Attributes:
        scores: Scaled q k^T.
        composed_scores: Scores after the pre-composition and a floating mask.
        weights: Softmax over the visible keys; zeros if there are none.
        composed_weights: Weights after the post-composition.
    """

    scores: Tensor
    composed_scores: Tensor
    weights: Tensor
    composed_weights: Tensor


def _widened(call: AttentionCall) -> AttentionCall:
    """Cast the tensors of a call to its compute dtype."""
    dtype = compute_dtype(call.q.dtype)
    pre, post = (None if weights is None else weights.map(lambda w: w.to(dtype)) for weights in (call.pre, call.post))
    bias = None if call.bias is None else call.bias.to(dtype)
    return call._replace(q=call.q.to(dtype), k=call.k.to(dtype), v=call.v.to(dtype), pre=pre, post=post, bias=bias)


def attention_maps(call: AttentionCall) -> AttentionMaps:
    """Compute every step of composed attention."""
    q, k, _, pre, post, visible, bias, document_ids, is_causal, window_size, scale, _, num_groups = _widened(call)
    T, S = q.shape[-2], k.shape[-2]
    by_key_head = q.unflatten(1, (k.shape[1], -1))  # heads that share a key head are consecutive
    scores = composed_scores = torch.einsum("bngtd,bnsd->bngts", by_key_head, k).flatten(1, 2) * scale
    if pre is not None:
        composed_scores = compose(scores, pre, num_groups)
    if bias is not None:
        composed_scores = composed_scores + bias
    block = visible_keys(T, S, is_causal=is_causal, window_size=window_size, device=q.device, query_offset=S - T)
    visible = both_visible(block, visible)
    if document_ids is not None:
        visible = both_visible(visible, mask_of_documents(document_ids, T))
    weights = composed_weights = masked_softmax(composed_scores, visible, may_be_empty=True)
    if post is not None:
        composed_weights = compose(weights, post, num_groups)
    return AttentionMaps(scores, composed_scores, weights, composed_weights)


def attention(call: AttentionCall, seed: Tensor | None = None) -> Tensor:
    """Compute composed attention densely: [B, H, T, D]. `seed` is the dropout seed, drawn if None."""
    weights = attention_maps(call).composed_weights
    if call.dropout_p > 0.0:
        weights = drop(weights, draw_seed(weights.device) if seed is None else seed, call.dropout_p)
    by_key_head = weights.unflatten(1, (call.v.shape[1], -1))
    out = torch.einsum("bngts,bnsd->bngtd", by_key_head, call.v.to(weights.dtype)).flatten(1, 2)
    return out.to(call.q.dtype)
