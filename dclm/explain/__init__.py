"""`dclm explain`: what the heads of language models do, and what composition makes of it."""

from dctrain.explain import diversity_command

from ..load import load_decoder
from .ablate import ablate
from .attribute import attribute
from .breakdown import breakdown
from .circuits import circuits
from .mixing import mixing
from .report import report

EXPLANATIONS = {
    "ablate": ablate,
    "attribute": attribute,
    "breakdown": breakdown,
    "circuits": circuits,
    "diversity": diversity_command(load_decoder),
    "mixing": mixing,
    "report": report,
}

__all__ = ["EXPLANATIONS"]
