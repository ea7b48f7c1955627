"""Calls that a compiler traced before a check on first use found something: the operator computes them by chunks."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank

import torch
from torch import Tensor

from ...weights import ComposeWeights, SideWeights
from ..call import Call
from ..compiled.opaque import attend_blocks, gradients_of_blocks
from ..masking import Documents
from .operands import Hiding, Operands, Options, pack
from .passes import Gradients


def call_of(
    q: Tensor, k: Tensor, v: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None, hiding: Hiding,
    options: Options,
) -> Call:  # fmt: skip
    """Put an operator's arguments together again; what a floating mask hides stays in it."""
    visible, bias = (hiding.mask, None) if _is_boolean(hiding.mask) else (None, hiding.mask)
    documents = None if hiding.starts is None else Documents(hiding.starts, hiding.stops)
    rest = (options.is_causal, options.window or None, options.scale, options.dropout_p, options.num_groups)
    return Call(q, k, v, pre, post, visible, bias, documents, *rest)


def is_trusted(call: Call, gradients: bool, is_few: bool = False) -> bool:
    """Check on first use what a compiler traced unchecked, and look up what was found."""
    from . import first_use

    if first_use.is_off(call.q.device):
        return True
    first_use.check(call, gradients, is_few)
    return first_use.is_trusted(call.q)


def _is_boolean(mask: Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.bool


def _split(call: Call) -> Call:
    """Split a floating mask into what it hides and what it adds."""
    if call.bias is None:
        return call
    visible = call.bias != -torch.inf
    return call._replace(visible=visible, bias=call.bias.masked_fill(~visible, 0.0))


def forward(call: Call, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute the output [B, H, T, D], and in place of log-sums [B, H, T] what nobody reads."""
    return attend_blocks(_split(call), seed), call.q.new_zeros(call.q.shape[:3], dtype=torch.float32)


def backward(d_out: Tensor, call: Call, seed: Tensor | None, mask_gradient: bool) -> Gradients:
    """Compute the gradients of q, k, v, of the operands, and of the mask if it is asked for."""
    dq, dk, dv, *weights, d_mask = gradients_of_blocks(d_out, _split(call), seed)
    sides = [pack(SideWeights(*weights[start : start + 3])) for start in (0, 3, 7, 10)]
    operands = Operands(sides[0], sides[1], weights[6], sides[2], sides[3], weights[13])
    return Gradients(dq, dk, dv, operands, d_mask if mask_gradient else None)
