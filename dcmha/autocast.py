"""Autocast of the operator's inputs, as PyTorch does for `scaled_dot_product_attention`."""

import torch
from torch import Tensor

from .weights import ComposeWeights


@torch.compiler.assume_constant_result
def _has_autocast(device_type: str) -> bool:
    """Whether a device type supports autocast; the compiler of torch 2.10 cannot trace this query."""
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the autocast dtype of a device type; None if autocast is disabled."""
    if not _has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def cast_inputs(
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    attn_mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, ComposeWeights | None, ComposeWeights | None, Tensor | None]:
    """Cast floating inputs of `composed_attention` to the autocast dtype; float64 is unchanged."""

    def cast(x: Tensor | None) -> Tensor | None:
        return x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x

    pre, post = (w if w is None else w.map(cast) for w in (pre, post))
    return cast(q), cast(k), cast(v), pre, post, cast(attn_mask)
