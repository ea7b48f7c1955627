"""A call of the operator, as every implementation takes it."""

# B batch, T query tokens, S key tokens, H heads, D head dim

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import Parameter

from ..weights import ComposeWeights, SideWeights
from .masking import Documents


class ComposeRanks(NamedTuple):
    """Ranks of the low-rank maps in a call, the larger one of its two compositions.

    Attributes:
        query: Of what the queries bring; 0 for no low-rank map.
        key: Of what the keys bring; None if they bring nothing.
    """

    query: int = 2
    key: int | None = 2


def ranks_of(pre: ComposeWeights | None, post: ComposeWeights | None) -> ComposeRanks:
    """Tell the ranks of a call."""
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
        bias: Added to the composed scores, finite, likewise; or None.
        documents: Of the tokens, or None.
        is_causal: Hide later keys.
        window: Keys a query sees, or None.
        scale: Factor on q k^T.
        dropout_p: Probability of dropping a composed weight.
        num_groups: Groups of heads.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    pre: ComposeWeights | None
    post: ComposeWeights | None
    visible: Tensor | None
    bias: Tensor | None
    documents: Documents | None
    is_causal: bool
    window: int | None
    scale: float
    dropout_p: float
    num_groups: int

    @property
    def mask(self) -> Tensor | None:
        """One mask with four axes for `visible` and `bias`: boolean, or floating with -inf where it hides; or None."""
        mask = self.visible
        if self.bias is not None:
            mask = self.bias if mask is None else self.bias.masked_fill(~mask, -torch.inf)
        return mask if mask is None else mask[(None,) * (4 - mask.dim())]

    @property
    def document_bounds(self) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """First tokens and ends of the keys' documents."""
        return (None, None) if self.documents is None else self.documents


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which inputs of `dtype` are computed with: at least float32."""
    return torch.promote_types(dtype, torch.float32)


@torch.compiler.assume_constant_result
def is_transformed() -> bool:
    """Tell whether this runs inside a transform of `torch.func`, such as `vmap`, `grad` or `jvp`."""
    return torch._C._are_functorch_transforms_active()


@torch.compiler.assume_constant_result
def is_exporting() -> bool:
    """Tell whether `torch.export` traces; the compiler of torch 2.9 takes its own traces for exports if it is asked."""
    return torch.compiler.is_exporting()


def is_watched(*operands: Tensor | None) -> bool:
    """Tell whether somebody needs to see the operator: a dispatch mode of torch, or a subclass of tensors."""
    return torch._C._len_torch_dispatch_stack() > 0 or any(
        x is not None and type(x) not in (Tensor, Parameter) for x in operands
    )


def refuse_derivative(impl: str, kind: str) -> NoReturn:
    """Raise for a derivative that an implementation does not have."""
    raise NotImplementedError(f"impl={impl!r} has no {kind} derivatives; use impl='reference'.")
