"""Freezing pooling parameters of the image tower in captioners, which use only the patches."""

import copy

import torch
from torch import nn

from dcmha import ComposedAttentionBase

from .network import as_tokens


def freeze_pooling(tower: nn.Module, image_size: int) -> None:
    """Freeze parameters that the patches do not depend on, because DDP waits for all gradients.

    Args:
        tower: A timm model.
        image_size: Side of its images, in pixels.

    Raises:
        UserError: If its features are neither a map nor tokens.
    """
    traced = copy.deepcopy(tower).to("meta").eval()
    for layer in traced.modules():
        if isinstance(layer, ComposedAttentionBase):
            layer.impl = "reference"  # supports the meta device
    images = torch.zeros(1, 3, image_size, image_size, device="meta")
    patches = as_tokens(traced.forward_features(images), tower.num_features)
    trained = {name: p for name, p in traced.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(patches.sum(), list(trained.values()), allow_unused=True)
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is None:
            tower.get_parameter(name).requires_grad_(False)
