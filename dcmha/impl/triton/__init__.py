"""Composed attention on GPUs: fused kernels that mix heads, combined with library matrix products.

Nothing of size T x S is stored: queries are processed in chunks on a workspace of fixed size, forward and backward. A
call uses one of three sets of kernels: decoding kernels for few queries without gradients; Gluon kernels (`impl/gluon`)
for 16-bit dtypes; and the Triton kernels of this folder. Imported on first use of `impl="triton"`. With
`TRITON_INTERPRET=1` in the environment before the first use, it runs on CPU tensors.
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
from ..dropout import draw_seed
from ..flatten import tensors_of
from . import decode_op, op
from .decode import MAX_QUERIES

log = logging.getLogger(__name__)
MAX_HEADS = 512  # maximum heads of a call during compilation
MAX_CHANNELS = 1024
CHANNELS, QUERIES, FEW_QUERIES = 64, 40, 3  # sizes of the self-check


ATTENTION: dict[
    str, Callable[[AttentionCall, Tensor | None], Tensor]
] = {  # by kernel set: function of a call and the dropout seed
    "decoding": decode_op.attention,
    "Triton": op.attention,
}
self_check.SOLVERS.update({"decoding": decode_op.solve, "Triton": op.attention.solve})
if gluon.why_unavailable() is None:
    from ..gluon import op as gluon_op

    ATTENTION["Gluon"] = gluon_op.attention
    self_check.SOLVERS["Gluon"] = gluon_op.attention.solve


def attention(call: AttentionCall) -> Tensor:
    """Compute composed attention of a call that "triton" supports (`why_not_triton`): [B, H, T, D]."""
    if not torch.compiler.is_compiling() and any(map(_has_tangent, tensors_of(call))):
        refuse_derivative("triton", "forward-mode")
    seed = draw_seed(call.q.device) if call.dropout_p > 0.0 else None
    return ATTENTION[kernels_of(call)](call, seed)


def _has_tangent(x: Tensor | None) -> bool:
    return x is not None and unpack_dual(x).tangent is not None


def kernels_of(call: AttentionCall) -> str:
    """Select the kernels of a call: "decoding", "Gluon" or "Triton"."""
    if is_decoding(call):
        return "decoding"
    return "Gluon" if _takes_gluon(call.q) else "Triton"


def _takes_gluon(q: Tensor) -> bool:
    """Whether queries use the Gluon kernels: 16-bit dtypes on a GPU, unless the self-check failed."""
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
    """Whether a call uses the decoding kernels, which support neither gradients nor dropout."""
    return call.q.shape[2] <= MAX_QUERIES and call.dropout_p == 0.0 and not _has_gradients(call)


def _has_gradients(call: AttentionCall) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors_of(call))


def check_kernels(call: AttentionCall) -> None:
    """Self-check the kernels of a call on first use and, if they fail, the kernels that replace them."""
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
        has_window=call.window_size is not None,
        has_documents=call.document_ids is not None,
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
    """Convert a number that a compiler traces as symbolic to a constant."""
    for constant in range(most):
        if constant == number:
            return constant
    return most
