"""PyTorch operator of the decoding kernels, without a gradient."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank

import torch
from torch import Tensor

from ...weights import ComposeWeights
from ..call import AttentionCall
from ..compiled.blocks import flat_weights, weights_from
from .decode import attend
from .packing import CallOptions, MaskOperands

PARTS = ("query_down", "query_up", "query_gate", "key_down", "key_up", "key_gate", "base")
WEIGHTS = ", ".join(f"Tensor? {composition}_{part}" for composition in ("pre", "post") for part in PARTS)
OPTIONS = "Tensor? mask, Tensor? starts, Tensor? stops, bool is_causal, SymInt window, float scale, SymInt num_groups"


@torch.library.custom_op(
    "dcmha::decode_attention", mutates_args=(), schema=f"(Tensor q, Tensor k, Tensor v, {WEIGHTS}, {OPTIONS}) -> Tensor"
)
def decoded(q, k, v, *rest):
    """Compute the output [B, H, T, D]; weights in the order of `flat_weights`."""
    count = len(PARTS)
    pre, post, (mask, starts, stops, is_causal, window_size, scale, num_groups) = (
        rest[:count], rest[count : 2 * count], rest[2 * count :],
    )  # fmt: skip
    mask_operands = MaskOperands(mask, starts, stops, None)
    options = CallOptions(is_causal, min(window_size, q.shape[2] + k.shape[2]), scale, 0.0, num_groups)
    pre, post = weights_from(pre), weights_from(post)
    with torch.cuda.device_of(q):
        pre, post = (ComposeWeights() if w is None else w.map(Tensor.contiguous) for w in (pre, post))
        k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
        return attend(q.contiguous(), k, v, pre, post, mask_operands, options)


@decoded.register_fake
def _(q, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def attention(call: AttentionCall, seed: None) -> Tensor:
    """Compute composed attention [B, H, T, D] of few queries, without dropout."""
    options = (call.is_causal, call.window_size or 0, call.scale, call.num_groups)
    weights = (*flat_weights(call.pre), *flat_weights(call.post))
    return decoded(call.q, call.k, call.v, *weights, call.mask, *call.document_bounds, *options)


def solve(call: AttentionCall, seed: None, d_out: None) -> list[Tensor]:
    """Compute the output; there are no gradients."""
    return [attention(call, seed)]
