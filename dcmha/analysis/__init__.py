"""Analysis of heads and their composition in a trained model. Depends only on torch; no plotting, no commands."""

from ..impl.reference import BRANCHES
from ..layer import composed_layers
from .breakdown import Breakdown
from .circuits import HeadWeights, attention_layers, head_outputs, head_weights
from .diversity import Diversity, head_diversity, model_diversity
from .interventions import Branch, composition_branches, scale_branches, scale_heads
from .mixing import Mixing, MixingMeter, Spread, measure_mixing
from .recording import Recorded, record_attention

__all__ = [
    "BRANCHES",
    "Branch",
    "Breakdown",
    "Diversity",
    "HeadWeights",
    "Mixing",
    "MixingMeter",
    "Recorded",
    "Spread",
    "attention_layers",
    "composed_layers",
    "composition_branches",
    "head_diversity",
    "head_outputs",
    "head_weights",
    "measure_mixing",
    "model_diversity",
    "record_attention",
    "scale_branches",
    "scale_heads",
]
