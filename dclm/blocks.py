"""Blocks of a decoder: attention and MLP with pre-norms, sequential or parallel."""

# B batch, T tokens, C model width, F hidden width of the MLP

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dcmha import ContextKV, DCAttention, DCCrossAttention, compose_options_of
from dcmha.attention import AttentionCache, Rope
from dcmha.impl.masking import DocumentBounds

from .config import DecoderConfig

QK_NORM_EPS = 1e-6


def make_norm(config: DecoderConfig, **dd) -> nn.Module:
    """Create a norm over the width."""
    norm = nn.LayerNorm if config.norm == "layer" else nn.RMSNorm
    return norm(config.dim, eps=config.norm_eps, **dd)


class MLP(nn.Module):
    """down(gelu(up x)), or SwiGLU's down(silu(gate x) * up x); `mlp_groups` scales groups of hidden channels.

    Args:
        config: Architecture of the decoder.
        **dd: Device and dtype of the parameters.
    """

    def __init__(self, config: DecoderConfig, **dd) -> None:
        super().__init__()
        self.gate = nn.Linear(config.dim, config.mlp_dim, config.bias, **dd) if config.mlp == "swiglu" else None
        self.up = nn.Linear(config.dim, config.mlp_dim, config.bias, **dd)
        self.down = nn.Linear(config.mlp_dim, config.dim, config.bias, **dd)
        groups = config.mlp_groups
        self.group_gate = nn.Linear(config.dim, groups, bias=False, **dd) if groups else None
        self.groups = slice(None)  # groups of this rank

    def forward(self, x: Tensor) -> Tensor:
        """Map [B, T, C] to [B, T, C]."""
        hidden = F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x)
        if self.group_gate is not None:
            logits = self.group_gate(x)
            weights = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32)).to(hidden.dtype)
            weights = weights[..., self.groups]
            hidden = (hidden.unflatten(-1, (weights.shape[-1], -1)) * weights[..., None]).flatten(-2)
        return self.down(hidden)


class CrossContext(NamedTuple):
    """A context sequence for cross-attention.

    Attributes:
        tokens: [B, S, context_dim].
        mask: Boolean [B, S], True = a real token; None without padding.
    """

    tokens: Tensor
    mask: Tensor | None = None


class DecoderBlock(nn.Module):
    """One layer of a decoder.

    Args:
        config: Architecture of the decoder.
        window_size: Attention window of this layer, or None.
        has_cross_attention: Whether the layer has cross-attention, after its self-attention.
        **dd: Device and dtype of the parameters.
    """

    def __init__(self, config: DecoderConfig, window_size: int | None, has_cross_attention: bool = False, **dd) -> None:
        super().__init__()
        self.parallel, self.is_causal = config.parallel_residual, config.is_causal
        self.attn_norm = make_norm(config, **dd)
        shared = {"qkv_bias": config.bias, "proj_bias": config.bias, "qk_norm": config.qk_norm, "impl": config.impl}
        shared |= {"norm_layer": partial(nn.RMSNorm, eps=QK_NORM_EPS), **dd}
        self.attn = DCAttention(
            config.dim,
            config.num_heads,
            num_kv_heads=config.num_kv_heads,
            window_size=window_size,
            **compose_options_of(config),
            **shared,
        )
        self.cross_norm = make_norm(config, **dd) if has_cross_attention else None
        options = compose_options_of(config.cross_options)
        self.cross = (
            DCCrossAttention(config.dim, config.num_heads, config.context_dim, **options, **shared)
            if has_cross_attention
            else None
        )
        self.mlp_norm = make_norm(config, **dd)
        self.mlp = MLP(config, **dd)

    def forward(
        self,
        x: Tensor,
        document_ids: DocumentBounds | None,
        rope: Rope | None,
        cache: AttentionCache | None,
        context: CrossContext | ContextKV | None = None,
    ) -> Tensor:
        """Map [B, T, C] to [B, T, C]; `context` is for cross-attention, the other arguments are those of
        `DCAttention`."""
        attention = {"is_causal": self.is_causal, "rope": rope, "cache": cache, "document_ids": document_ids}
        attended = x + self.attn(self.attn_norm(x), **attention)
        if self.cross is not None:
            given = context if isinstance(context, CrossContext) else (context,)
            attended = attended + self.cross(self.cross_norm(attended), *given)
        return attended + self.mlp(self.mlp_norm(x if self.parallel else attended))
