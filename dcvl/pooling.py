"""What only the pooled output of an image tower takes: a captioner, which looks at the patches, does not train it."""

import copy

import torch
from torch import nn

from dcmha import ComposedAttentionBase

from .network import as_tokens


def freeze_pooling(tower: nn.Module, image_size: int) -> None:
    """Train no parameter that the patches do not depend on: data-parallel training waits for every gradient.

    Args:
        tower: A model of timm.
        image_size: Side of its images, in pixels.

    Raises:
        UserError: If its features are neither a map nor tokens.
    """
    traced = copy.deepcopy(tower).to("meta").eval()
    for layer in traced.modules():
        if isinstance(layer, ComposedAttentionBase):
            layer.impl = "reference"  # which needs no device
    images = torch.zeros(1, 3, image_size, image_size, device="meta")
    patches = as_tokens(traced.forward_features(images), tower.num_features)
    trained = {name: p for name, p in traced.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(patches.sum(), list(trained.values()), allow_unused=True)
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            tower.get_parameter(name).requires_grad_(False)
