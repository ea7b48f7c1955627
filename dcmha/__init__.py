"""Dynamically Composable Multi-Head Attention (DCMHA, ICML 2024): the operator and its layer. Needs torch alone."""

from .attention import DCAttention
from .cache import DecodingCache
from .choice import resolve_impl
from .complexity import ComposeCost, approximate_overhead, compose_cost
from .cross import DCCrossAttention
from .functional import composed_attention
from .recording import record_attention
from .rotary import rotary_embedding
from .weights import ComposeProjection, ComposeWeights

__all__ = [
    "ComposeCost",
    "ComposeProjection",
    "ComposeWeights",
    "DCAttention",
    "DCCrossAttention",
    "DecodingCache",
    "approximate_overhead",
    "compose_cost",
    "composed_attention",
    "record_attention",
    "resolve_impl",
    "rotary_embedding",
]
