"""Composed attention in chunks of queries: memory grows with chunk x S, as the backward pass recomputes each chunk.

The composition of a chunk consists of broadcasts and sums over the heads, which `torch.compile` fuses into few kernels
(`blocks.py`). It runs on any device. On CUDA the chunks are compiled; elsewhere only if the caller compiles. To a
compiler, a call with several chunks is one custom operator (`custom_op.py`). Computations are in float32 (float64 for
float64 inputs).
"""

# B batch, T query tokens, S key tokens, H heads, D head dim

from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..call import AttentionCall, is_exporting, is_transformed
from ..dropout import draw_seed
from .blocks import attend, attend_compiled
from .chunking import is_one_block, list_blocks


def attention(call: AttentionCall) -> Tensor:
    """Compute composed attention chunk by chunk: [B, H, T, D]."""
    is_compiling = torch.compiler.is_compiling()
    seed = draw_seed(call.q.device) if call.dropout_p > 0.0 else None
    if not is_one_block(call) and is_compiling and not is_exporting() and not is_transformed():
        from .custom_op import chunked_attention

        return chunked_attention(call, seed)
    attend_here = attend_compiled if call.q.is_cuda and not is_transformed() and not is_compiling else attend
    blocks = list_blocks(call, seed)
    if len(blocks) == 1:
        return attend_here(blocks[0])
    if not torch.is_grad_enabled() or is_transformed():  # torch.func transforms do not support recomputation
        return torch.cat([attend_here(block) for block in blocks], dim=2)
    recomputed = partial(checkpoint, attend_here, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([recomputed(block) for block in blocks], dim=2)
