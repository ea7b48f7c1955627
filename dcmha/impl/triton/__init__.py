"""Composed attention in GPU kernels that only mix heads, with library products between them.

Nothing of size T x S is kept: queries are worked through in chunks on a workspace of fixed size, forward and backward.
A call goes through one of three kinds of kernels: those for few queries without a gradient, as in decoding; those in
Gluon (`impl/gluon`) for 16-bit dtypes; and the ones here.
Imported only when `impl="triton"` is chosen. `TRITON_INTERPRET=1` in the environment before the first use makes it run
on CPU tensors.
"""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.forward_ad import unpack_dual

from ...weights import ComposeWeights, SideWeights
from .. import gluon, self_check
from ..call import AttentionCall, refuse_derivative
from ..compiled.blocks import tensors_of
from ..dropout import draw_seed
from . import decode_op, op
from .decode import MAX_QUERIES

log = logging.getLogger(__name__)
MAX_HEADS = 512  # of a call whose kind a compiler may ask for
MAX_CHANNELS = 1024
CHANNELS, QUERIES, FEW_QUERIES = 64, 40, 3  # of a check on first use


ATTENTION: dict[
    str, Callable[[AttentionCall, Tensor | None], Tensor]
] = {  # by kernels, of a call and the seed of dropout
    "decoding": decode_op.attention,
    "Triton": op.attention,
}
self_check.SOLVERS.update({"decoding": decode_op.solve, "Triton": op.solve})
if gluon.why_unavailable() is None:
    from ..gluon import op as gluon_op

    ATTENTION["Gluon"] = gluon_op.attention
    self_check.SOLVERS["Gluon"] = gluon_op.solve


def attention(call: AttentionCall) -> Tensor:
    """Compute composed attention, of a call that `why_not_triton` lets pass: [B, H, T, D]."""
    if not torch.compiler.is_compiling() and any(map(_has_tangent, tensors_of(call))):
        refuse_derivative("triton", "forward-mode")
    seed = draw_seed(call.q.device) if call.dropout_p > 0.0 else None
    return ATTENTION[kernels_of(call)](call, seed)


def _has_tangent(x: Tensor | None) -> bool:
    return x is not None and unpack_dual(x).tangent is not None


def kernels_of(call: AttentionCall) -> str:
    """Choose the kernels of a call: "decoding", "Gluon" or "Triton"."""
    if is_decoding(call):
        return "decoding"
    return "Gluon" if _takes_gluon(call.q) else "Triton"


def _takes_gluon(q: Tensor) -> bool:
    """Tell whether queries go through the kernels in Gluon: 16-bit ones on a GPU, if nothing was found wrong."""
    is_16bit = q.dtype in (torch.bfloat16, torch.float16)
    return is_16bit and q.is_cuda and _is_gluon_right(q.device, q.dtype)


@torch.compiler.assume_constant_result
def _is_gluon_right(device: torch.device, dtype: torch.dtype) -> bool:
    if "Gluon" not in ATTENTION:
        _report(gluon.why_unavailable())
        return False
    return self_check.finding_of("Gluon", device, dtype) is None


@cache
def _report(reason: str) -> None:
    log.warning("16-bit calls of composed attention use the older, slower kernels: %s.", reason)


def is_decoding(call: AttentionCall) -> bool:
    """Tell whether a call goes through the kernels of few queries, which have no gradient and drop nothing."""
    return call.q.shape[2] <= MAX_QUERIES and call.dropout_p == 0.0 and not _has_gradients(call)


def _has_gradients(call: AttentionCall) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors_of(call))


def check_kernels(call: AttentionCall) -> None:
    """Check on first use the kernels of a call and, where these are wrong, those that take their place."""
    if not torch.compiler.is_compiling() and isinstance(call.q, FakeTensor):
        return
    for _ in range(2):
        if self_check.check(*_kind_of(call)):
            return


def _kind_of(call: AttentionCall) -> self_check.Kind:
    q, is_few = call.q, is_decoding(call)
    heads = [_constant(n, MAX_HEADS) for n in (q.shape[1], call.k.shape[1], call.num_groups)]
    tokens, channels = QUERIES, CHANNELS
    if is_few:
        tokens, channels = (1 if q.shape[2] == 1 else FEW_QUERIES), _constant(q.shape[3], MAX_CHANNELS)
    mask = None if call.visible is None else "boolean"
    if call.bias is not None:
        mask = "gradient" if call.bias.requires_grad else "floating"
    return self_check.Kind(
        kernels=kernels_of(call),
        device=q.device,
        dtype=q.dtype,
        shape=(*heads, tokens, channels),
        pre=_branches(call.pre),
        post=_branches(call.post),
        mask=mask,
        is_causal=call.is_causal,
        has_window=call.window is not None,
        has_documents=call.documents is not None,
        dropout_p=self_check.DROPOUT if call.dropout_p > 0.0 else 0.0,
        gradients=_has_gradients(call),
    )


def _branches(weights: ComposeWeights | None) -> tuple[int, bool, int, bool, bool] | None:
    if weights is None:
        return None
    sides = [part for side in (weights.query, weights.key) for part in (_rank(side), side.gate is not None)]
    return *sides, weights.base is not None


def _rank(side: SideWeights) -> int:
    return 0 if side.down is None else _constant(side.down.shape[2], MAX_HEADS)


def _constant(number: int, most: int) -> int:
    """Make a number that a compiler takes for a variable a constant."""
    for constant in range(most):
        if constant == number:
            return constant
    return most
