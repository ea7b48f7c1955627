"""Composed attention in Triton kernels that only mix heads, with library products between them.

Nothing of size T x S is kept: queries are worked through in chunks on a workspace of fixed size, forward and backward.
Few queries without a gradient, as in decoding, have kernels of their own.
Imported only when `impl="triton"` is chosen. `TRITON_INTERPRET=1` in the environment before the first use makes it run
on CPU tensors.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from ...weights import ComposeWeights
from ..call import Call, refuse_derivative
from ..compiled.blocks import flat_weights, tensors_of
from ..dropout import draw_seed
from .decode import MOST_QUERIES
from .decode_op import decoded
from .op import composed
from .operands import pack


def attention(call: Call) -> Tensor:
    """Compute composed attention, of a call that `why_not_triton` lets pass: [B, H, T, D]."""
    if not torch.compiler.is_compiling() and any(map(_has_tangent, tensors_of(call))):
        refuse_derivative("triton", "forward-mode")
    if is_decoding(call):
        return _decode(call)
    return composed(*arguments_of(call, draw_seed(call.q.device) if call.dropout_p > 0.0 else None))[0]


def arguments_of(call: Call, seed: Tensor | None) -> tuple:
    """Make of a call the arguments of its operator."""
    operands = [operand for weights in (call.pre, call.post) for operand in _operands(weights)]
    options = (call.is_causal, call.window or 0, call.scale, call.dropout_p, call.num_groups)
    return call.q, call.k, call.v, *operands, _mask(call), *_documents(call), seed, *options


def _has_tangent(x: Tensor | None) -> bool:
    return x is not None and unpack_dual(x).tangent is not None


def is_decoding(call: Call) -> bool:
    """Tell whether a call goes through the kernels of few queries, which have no gradient and drop nothing."""
    if call.q.shape[2] > MOST_QUERIES or call.dropout_p > 0.0:
        return False
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors_of(call)))


def _decode(call: Call) -> Tensor:
    options = (call.is_causal, call.window or 0, call.scale, call.num_groups)
    return decoded(
        call.q,
        call.k,
        call.v,
        *flat_weights(call.pre),
        *flat_weights(call.post),
        _mask(call),
        *_documents(call),
        *options,
    )


def _documents(call: Call) -> tuple[Tensor, Tensor] | tuple[None, None]:
    return (None, None) if call.documents is None else call.documents


def _mask(call: Call) -> Tensor | None:
    """Make one mask with four axes of what hides and what is added: boolean, or floating with -inf where it hides."""
    mask = call.visible
    if call.bias is not None:
        mask = call.bias if mask is None else call.bias.masked_fill(~mask, -torch.inf)
    return mask if mask is None else mask[(None,) * (4 - mask.dim())]


def _operands(weights: ComposeWeights | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Pack the query side, the key side, and give the base of a composition."""
    if weights is None:
        return None, None, None
    return pack(weights.query), pack(weights.key), weights.base
