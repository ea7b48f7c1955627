"""`dcvision explain diversity`."""

from torch import nn

from dctrain.explain import diversity_command

from ..evaluation.networks import load_classifier


def _load(checkpoint: str) -> nn.Module:
    return load_classifier(checkpoint).model


diversity = diversity_command(_load)
