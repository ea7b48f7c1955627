"""CaiT: attention with its own static mixing of heads (talking heads), and class attention."""

from functools import partial

import torch
from torch import Tensor, nn

from .base import AttentionParts, AttentionWidths, Family, heads, one_width, output, project


def _cait(module: nn.Module, x: Tensor) -> AttentionParts:
    """The mixing W a + b over heads is a composition with static base W^T - I. For scores the softmax is invariant to
    b; for weights, b adds b times the sum of the head's values.
    """
    q, k, v = project(module, x)
    pre, post = (static_mixing(projection.weight) for projection in (module.proj_l, module.proj_w))

    def finish(attended: Tensor) -> Tensor:
        return output(module, attended + constant_of(module.proj_w.bias, v))

    return AttentionParts(q, k, v, x, x, finish, None, pre, post)


def static_mixing(weight: Tensor) -> Tensor:
    """Convert a projection over heads [to, from] to a static base, without the identity."""
    return weight.T - torch.eye(len(weight), dtype=weight.dtype, device=weight.device)


def constant_of(bias: Tensor, v: Tensor) -> Tensor:
    """Effect on the output of a constant [H] added to the weights of each head, for values [B, H, S, D]."""
    return bias.view(1, -1, 1, 1) * v.sum(2, keepdim=True)


def _class_attention(module: nn.Module, x: Tensor) -> AttentionParts:
    """The first token of [B, S, C] attends to all."""
    first = x[:, :1]
    q, k, v = (heads(part, module.num_heads) for part in (module.q(first), module.k(x), module.v(x)))
    return AttentionParts(q, k, v, first, x, partial(output, module))


CAIT = Family(_cait, one_width, mixes_heads=True)
CLASS_ATTENTION = Family(_class_attention, lambda module: AttentionWidths(module.q.in_features, module.k.in_features))
