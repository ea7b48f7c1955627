"""Attention without composition: PyTorch's `scaled_dot_product_attention`."""

# B batch, T query tokens, S key tokens, H heads, D head dim

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import AttentionCall
from .masking import both_visible, mask_of_documents, visible_keys


def attention(call: AttentionCall) -> Tensor:
    """Compute plain attention [B, H, T, D] with one equivalent mask; the output is zero without visible keys."""
    q, k, v, _, _, visible, bias, document_ids, is_causal, window_size, scale, dropout_p, _ = call
    T, S = q.shape[-2], k.shape[-2]
    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": bool(q.shape[1] != k.shape[1])}
    if document_ids is not None:
        visible = both_visible(visible, mask_of_documents(document_ids, T))
    if visible is None and bias is None and window_size is None and (not is_causal or T == S):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **options)
    block = visible_keys(T, S, is_causal=is_causal, window_size=window_size, device=q.device, query_offset=S - T)
    mask, empty = both_visible(block, visible), None
    if mask is not None and (visible is not None or T > S):
        empty = ~mask.any(-1, keepdim=True)
        mask = mask | empty
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return out if empty is None else out.masked_fill(empty, 0.0)
