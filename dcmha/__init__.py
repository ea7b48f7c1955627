"""Dynamically Composable Multi-Head Attention (DCMHA, ICML 2024): the operator and its layer. Needs torch alone."""

from .attention import DCAttention
from .complexity import ComposeCost, approximate_overhead, compose_cost
from .functional import composed_attention, resolve_impl
from .weights import ComposeProjection, ComposeWeights

__all__ = [
    "ComposeCost",
    "ComposeProjection",
    "ComposeWeights",
    "DCAttention",
    "approximate_overhead",
    "compose_cost",
    "composed_attention",
    "resolve_impl",
]
