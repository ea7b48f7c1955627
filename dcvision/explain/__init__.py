"""`dcvision explain`: what the heads of image models do, and what composition makes of it."""

from torch import nn

from dctrain.explain import diversity_command

from ..evaluation.networks import load_classifier
from .ablate import ablate
from .attribute import attribute
from .breakdown import breakdown
from .circuits import circuits
from .mixing import mixing
from .report import report


def _load(checkpoint: str) -> nn.Module:
    return load_classifier(checkpoint).model


EXPLANATIONS = {
    "ablate": ablate,
    "attribute": attribute,
    "breakdown": breakdown,
    "circuits": circuits,
    "diversity": diversity_command(_load),
    "mixing": mixing,
    "report": report,
}

__all__ = ["EXPLANATIONS"]
