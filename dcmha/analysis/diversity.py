"""Diversity of the heads of a layer (paper, section 4.3 and figure 5; Cordonnier et al., 2020)."""

# H heads, D head dim, C model width, K principal components

from typing import NamedTuple

import torch
from torch import Tensor, nn

from .circuits import attention_layers, head_weights


class Diversity(NamedTuple):
    """Share of the variance of the heads' matrices that the first principal components capture, for one layer.

    Attributes:
        qk: [K], for the concatenated W_Q W_K^T of all heads; increases to 1, K = min(C, H D). Lower means more diverse.
        ov: [K], for W_O W_V.
    """

    qk: Tensor
    ov: Tensor


@torch.no_grad()
def head_diversity(layer: nn.Module) -> Diversity:
    """Compute the cumulative captured variance of a layer's QK and OV matrices, in float64.

    Each head's matrix is C x C with rank D. Their concatenation [C, H C] has the same left singular vectors and
    singular values as a matrix [C, H D] made of their factors, so the large matrix is never formed.

    Args:
        layer: An attention layer from `attention_layers`.
    """
    query, key, value, output = (part.double() for part in head_weights(layer))
    return Diversity(captured_variance(query.mT, key.mT), captured_variance(output, value.mT))


def model_diversity(model: nn.Module) -> dict[str, Diversity]:
    """Compute `head_diversity` of every attention layer, by name."""
    return {name: head_diversity(layer) for name, layer in attention_layers(model).items()}


def captured_variance(left: Tensor, right: Tensor) -> Tensor:
    """Compute the cumulative variance captured by the principal components of [left_1 right_1^T, left_2 right_2^T,
    ...].

    The matrix is not centered, because a mean over rows of weights has no meaning for heads.

    Args:
        left: [H, C, D].
        right: [H, C', D].

    Returns:
        [min(C, H D)], shares that increase to 1; all 1 if there is no variance.
    """
    triangles = torch.linalg.qr(right, mode="r").R  # right = an orthonormal matrix times this
    factor = torch.cat((left @ triangles.mT).unbind(0), 1)  # [C, H D]
    gram = factor.mT @ factor if factor.shape[1] < factor.shape[0] else factor @ factor.mT
    variances = torch.linalg.eigvalsh(gram).flip(0).clamp(min=0.0)
    total = variances.sum()
    return variances.cumsum(0) / total if total > 0 else torch.ones_like(variances)
