"""PyTorch operator of the decoding kernels, without a gradient."""

# B batch, T query tokens, S key tokens, H heads, D head dim

import torch
from torch import Tensor

from ...weights import ComposeWeights
from ..call import AttentionCall
from ..flatten import SCHEMA, flatten, unflatten, with_one_mask
from .decode import attend
from .packing import CallOptions, MaskOperands


@torch.library.custom_op("dcmha::decoding_attention", mutates_args=(), schema=f"({SCHEMA}) -> Tensor")
def decoded(*arguments):
    """Compute the output [B, H, T, D] of a call with one mask; the arguments are those of `flatten`."""
    call, _ = unflatten(arguments)
    q, k, v = call.q.contiguous(), call.k, call.v
    mask_operands = MaskOperands(call.mask, *call.document_bounds, None)
    window_size = min(call.window_size or 0, q.shape[2] + k.shape[2])
    options = CallOptions(call.is_causal, window_size, call.scale, 0.0, call.num_groups)
    with torch.cuda.device_of(q):
        pre, post = (ComposeWeights() if w is None else w.map(Tensor.contiguous) for w in (call.pre, call.post))
        k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
        return attend(q, k, v, pre, post, mask_operands, options)


@decoded.register_fake
def _(q, *rest):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def attention(call: AttentionCall, seed: None) -> Tensor:
    """Compute composed attention [B, H, T, D] of few queries, without dropout."""
    return decoded(*flatten(with_one_mask(call), seed))


def solve(call: AttentionCall, seed: None, d_out: None) -> list[Tensor]:
    """Compute the output; there are no gradients."""
    return [attention(call, seed)]
