"""Library matrix products of a chunk, and writing their results to the tensors of the call."""

# B batch, T query tokens, S key tokens, H heads, D head dim

import torch
from torch import Tensor

from ..chunks import Chunk, fold
from .call import Attention


def multiply(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Multiply batches of matrices into a tensor: scale a b."""
    torch.baddbmm(out, a, b, beta=0.0, alpha=scale, out=out)


def accumulate(a: Tensor, b: Tensor, scale: float, out: Tensor) -> None:
    """Add scale a b to a float32 tensor."""
    torch.baddbmm(out, a, b, out_dtype=torch.float32, beta=1.0, alpha=scale, out=out)


def multiply_queries(queries: Tensor, keys: Tensor, scale: float, workspace: Tensor) -> None:
    """Multiply queries with transposed keys (or gradients of outputs with values) into a workspace."""
    multiply(queries, keys.mT, scale, workspace)


def put_product(whole: Tensor, a: Tensor, b: Tensor, scale: float, chunk: Chunk, call: Attention) -> None:
    """Write scale a b, values of a chunk's queries, to [B, H, T, D]."""
    if call.is_plain(chunk):
        multiply(a, b, scale, call.queries(whole, chunk))
        return
    product = torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0.0, alpha=scale)
    place = whole[chunk.rows, :, chunk.queries].unflatten(1, (-1, call.heads.shared))
    place.copy_(chunk.of_queries(product, call.heads))


def add_product(total: Tensor, a: Tensor, b: Tensor, scale: float, chunk: Chunk, call: Attention) -> None:
    """Write scale a^T b, values of a chunk's keys, to [B, H / shared, S, D], or add it to float32 sums."""
    if chunk.plane_blocks == 1:
        add = multiply if total.dtype == a.dtype else accumulate
        add(a.mT, b, scale, call.keys(total, chunk))
        return
    product = torch.baddbmm(a.new_empty(1, 1, 1), a.mT, b, beta=0.0, alpha=scale)
    fold(total[chunk.rows].flatten(0, 1), chunk.of_keys(product, call.heads), chunk)
