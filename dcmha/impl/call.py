"""AttentionCall: the checked arguments of one operator call, the input of every implementation."""

# B batch, T query tokens, S key tokens, H heads, D head dim

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from ..weights import ComposeWeights, SideWeights
from .masking import DocumentBounds


class ComposeRanks(NamedTuple):
    """Ranks of the dynamic projections in a call: the maximum over its two compositions.

    Attributes:
        query: Query side; 0 without a dynamic projection.
        key: Key side; None without a key side.
    """

    query: int = 2
    key: int | None = 2


def ranks_of(pre: ComposeWeights | None, post: ComposeWeights | None) -> ComposeRanks:
    """Return the ranks of a call."""
    query, key = 0, None
    for weights in (pre, post):
        if weights is None:
            continue
        query = max(query, _rank(weights.query))
        if weights.key.down is not None or weights.key.gate is not None:
            key = max(key or 0, _rank(weights.key))
    return ComposeRanks(query, key)


def _rank(side: SideWeights) -> int:
    return 0 if side.down is None else side.down.shape[2]


class AttentionCall(NamedTuple):
    """Arguments of `composed_attention`, already checked, with the mask split and the scale filled in.

    Attributes:
        q: Queries [B, H, T, D].
        k: Keys [B, H, S, D].
        v: Values [B, H, S, D].
        pre: Composition of the scores, or None.
        post: Composition of the weights, or None.
        visible: Boolean, at least two axes, broadcastable to [B, H, T, S]: False hides a key; or None.
        bias: Finite bias added to the composed scores, broadcastable likewise; or None.
        document_ids: Document bounds of the keys, or None.
        is_causal: Hide later keys.
        window_size: Keys visible to a query, or None.
        scale: Factor on q k^T.
        dropout_p: Probability of dropping a composed weight.
        num_groups: Head groups.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    visible: Tensor | None
    bias: Tensor | None
    document_ids: DocumentBounds | None
    is_causal: bool
    window_size: int | None
    scale: float
    dropout_p: float
    num_groups: int

    @property
    def mask(self) -> Tensor | None:
        """`visible` and `bias` as one mask with four axes: boolean, or floating with -inf for hidden keys; or None."""
        mask = self.visible
        if self.bias is not None:
            mask = self.bias if mask is None else self.bias.masked_fill(~mask, -torch.inf)
        return mask if mask is None else mask[(None,) * (4 - mask.dim())]

    @property
    def document_bounds(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """First token and end of each key's document."""
        return (None, None) if self.document_ids is None else self.document_ids


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of computations on inputs of `dtype`: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@torch.compiler.assume_constant_result
def is_transformed() -> bool:
    """Whether this runs inside a transform of `torch.func`, such as `vmap`, `grad` or `jvp`."""
    return torch._C._are_functorch_transforms_active()


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Whether `torch.export` is tracing. (In torch 2.9 `torch.compiler.is_exporting` is also true in
    `torch.compile`.)"""
    return torch.compiler.is_exporting()


def needs_dispatcher(*operands: Tensor | None) -> bool:
    """Whether a call must go through the dispatcher.

    This is the case in dispatch modes and transforms, and for operands that are tensor subclasses or whose memory does
    not contain their values (negative bit, zero tensors).
    """
    if torch._C._len_torch_dispatch_stack() > 0 or torch._C._are_functorch_transforms_active():
        return True
    return any(
        x is not None and (type(x) not in (Tensor, Parameter) or x.is_neg() or torch._is_zerotensor(x))
        for x in operands
    )


def refuse_derivative(impl: str, kind: str) -> NoReturn:
    """Raise for a derivative that an implementation does not support."""
    raise NotImplementedError(f"impl={impl!r} has no {kind} derivatives; use impl='reference'.")
