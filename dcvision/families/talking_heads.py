"""CaiT: attention that mixes heads by static projections of its own, and attention of the class token."""

from functools import partial

import torch
from torch import Tensor, nn

from .base import AttentionParts, AttentionWidths, Family, heads, one_width, output, project


def _cait(module: nn.Module, x: Tensor) -> AttentionParts:
    """Scores become W a + b over heads, which is composition with the static base W^T - I. The softmax does not see the
    constant b of a head; that of the weights adds b times the sum of the head's values.
    """
    q, k, v = project(module, x)
    pre, post = (static_mixing(projection.weight) for projection in (module.proj_l, module.proj_w))

    def finish(attended: Tensor) -> Tensor:
        return output(module, attended + constant_of(module.proj_w.bias, v))

    return AttentionParts(q, k, v, x, x, finish, None, pre, post)


def static_mixing(weight: Tensor) -> Tensor:
    """Write a projection over heads [to, from] as the static part of a composition, without the identity."""
    return weight.T - torch.eye(len(weight), dtype=weight.dtype, device=weight.device)


def constant_of(bias: Tensor, v: Tensor) -> Tensor:
    """Compute what a constant of each head [H], added to its weights, adds to its output, for values [B, H, S, D]."""
    return bias.view(1, -1, 1, 1) * v.sum(2, keepdim=True)


def _class_attention(module: nn.Module, x: Tensor) -> AttentionParts:
    """The first token of [B, S, C] attends to all."""
    first = x[:, :1]
    q, k, v = (heads(part, module.num_heads) for part in (module.q(first), module.k(x), module.v(x)))
    return AttentionParts(q, k, v, first, x, partial(output, module))


CAIT = Family(_cait, one_width, mixes_heads=True)
CLASS_ATTENTION = Family(_class_attention, lambda module: AttentionWidths(module.q.in_features, module.k.in_features))
