"""Dynamically Composable Multi-Head Attention (DCMHA, ICML 2024): the operator and its layers. Needs torch alone."""

from .analysis import record_attention
from .attention import DCAttention
from .cache import DecodingCache
from .complexity import ComposeCost, approximate_overhead, attention_flops, compose_cost, visible_pairs
from .cross import ContextKV, DCCrossAttention
from .dispatch import resolve_impl
from .functional import composed_attention
from .layer import ComposedAttentionBase
from .options import COMPOSE_OPTIONS, ComposeOptions, compose_options_of
from .parallel import ShardedDim, split_heads
from .rotary import rotary_embedding
from .weights import ComposeProjection, ComposeWeights, SideWeights

__all__ = [
    "COMPOSE_OPTIONS",
    "ComposeCost",
    "ComposeOptions",
    "ComposeProjection",
    "ComposeWeights",
    "ComposedAttentionBase",
    "ContextKV",
    "DCAttention",
    "DCCrossAttention",
    "DecodingCache",
    "ShardedDim",
    "SideWeights",
    "approximate_overhead",
    "attention_flops",
    "compose_cost",
    "compose_options_of",
    "composed_attention",
    "record_attention",
    "resolve_impl",
    "rotary_embedding",
    "split_heads",
    "visible_pairs",
]
