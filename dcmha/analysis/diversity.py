"""How different the heads of a layer are (paper, section 4.3 and figure 5; Cordonnier et al., 2020)."""

# H heads, D head dim, C model width, K principal components

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .circuits import attention_layers, head_weights


class Diversity(NamedTuple):
    """Of one layer, what share of the variance of its heads' matrices the first components capture.

    Attributes:
        qk: [K], of the heads' W_Q W_K^T side by side; it ascends to 1, K = min(C, H D). Lower is more diverse.
        ov: [K], the same of W_O W_V.
    """

    qk: Tensor
    ov: Tensor


@torch.no_grad()
def head_diversity(layer: nn.Module) -> Diversity:
    """Compute the cumulative captured variance of a layer's QK and OV matrices, in float64.

    Each head's matrix is C x C and of rank D; [C, H C] of them side by side have the left singular vectors and the
    singular values of [C, H D] that their factors make, and no more is formed.

    Args:
        layer: An attention layer, as `attention_layers` finds them.
    """
    query, key, value, output = (part.double() for part in head_weights(layer))
    return Diversity(captured_variance(query.mT, key.mT), captured_variance(output, value.mT))


def model_diversity(model: nn.Module) -> dict[str, Diversity]:
    """Compute `head_diversity` of every attention layer, by name."""
    return {name: head_diversity(layer) for name, layer in attention_layers(model).items()}


def captured_variance(left: Tensor, right: Tensor) -> Tensor:
    """Compute what the principal components of [left_1 right_1^T, left_2 right_2^T, ...] capture of its variance.

    Not centred: a mean over rows of weights is nothing that heads have.

    Args:
        left: [H, C, D].
        right: [H, C', D].

    Returns:
        [min(C, H D)], shares that ascend to 1; all 1 where there is no variance.
    """
    triangles = torch.linalg.qr(right, mode="r").R  # right = an orthonormal matrix times this
    factor = torch.cat((left @ triangles.mT).unbind(0), 1)  # [C, H D]
    gram = factor.mT @ factor if factor.shape[1] < factor.shape[0] else factor @ factor.mT
    variances = torch.linalg.eigvalsh(gram).flip(0).clamp(min=0.0)
    total = variances.sum()
    return variances.cumsum(0) / total if total > 0 else torch.ones_like(variances)
