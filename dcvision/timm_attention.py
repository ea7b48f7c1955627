"""Composed counterparts of timm's attention classes.

Each shares the parameters and methods of timm's class, and attends like `DCAttention`. State-dict keys are unchanged;
new parameters are under `compose.`.
"""

# B batch, T tokens, H heads, D head dim, C model width

from functools import partial

import torch
import torch.nn.functional as F
from timm.layers import AttentionPoolLatent, apply_rot_embed_cat
from timm.layers.attention import Attention, AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor, nn

from dcmha import COMPOSE_OPTIONS, DCAttention, DCCrossAttention, compose_options_of
from dcmha.cross import CrossComposeProjection
from dcmha.options import check_names

from .families.base import share_parameters


class ComposedTimmModule(DCAttention):
    """`DCAttention` that shares parameters, buffers, submodules and attributes with a timm attention module.

    Args:
        attention: The replaced module.
        **options: Options of `DCAttention` (`DCAttention.OPTIONS`).
    """

    def __init__(self, attention: nn.Module, **options) -> None:
        nn.Module.__init__(self)
        share_parameters(self, attention)
        self._set_options(**options)
        projection = attention.qkv if attention.qkv is not None else attention.q_proj
        self.dim, self.attn_dim = projection.in_features, attention.proj.in_features
        self.head_dim = self.attn_dim // self.num_heads
        self.num_kv_heads = getattr(attention, "num_kv_heads", self.num_heads)
        for name in ("q_norm", "k_norm", "norm"):
            if not hasattr(self, name):
                setattr(self, name, nn.Identity())
        self.gate = getattr(attention, "gate", None)
        self.compose = self._make_projection(
            self.dim, {"device": projection.weight.device, "dtype": projection.weight.dtype}
        )


class ComposedAttention(ComposedTimmModule, Attention):
    """Attention of `VisionTransformer` (ViT, DeiT, DeiT3, BEiT3, CLIP, SigLIP, DINOv2) and NaFlexViT."""


class WithBiases(ComposedTimmModule):
    """Base of families with separate bias parameters for q and v."""

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qkv is None:
            return tuple(self._heads(projection(x)) for projection in (self.q_proj, self.k_proj, self.v_proj))
        bias = None if self.q_bias is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
        return tuple(self._heads(part) for part in F.linear(x, self.qkv.weight, bias).chunk(3, -1))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H D] to [B, H, T, D]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class WithRotation(ComposedTimmModule):
    """Base of families with rotary positions: `forward` accepts timm's rotation table."""

    def forward(
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Compute self-attention over `x` [B, T, C]; `rope` is [T - prefix, 2 D] or [B, 1, T - prefix, 2 D], or
        None."""
        rotate = None if rope is None else partial(self._rotate, rope)
        return super().forward(x, attn_mask, is_causal, rope=rotate)

    def _rotate(self, rope: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate all tokens except the prefix tokens."""
        prefix, half = self.num_prefix_tokens, self.rotate_half
        return tuple(
            torch.cat([x[:, :, :prefix], apply_rot_embed_cat(x[:, :, prefix:], rope, half=half)], 2).type_as(x)
            for x in (q, k)
        )


class ComposedEvaAttention(WithRotation, WithBiases, EvaAttention):
    """Attention of EVA, EVA-02 and DINOv3."""


class ComposedRopeAttention(WithRotation, AttentionRope):
    """Attention of EVA's other block and of NaFlexViT with rotary positions; k and v may have fewer heads."""

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self.qkv is not None:
            return super()._project(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)


class ComposedBeitAttention(WithBiases, BeitAttention):
    """Attention of BEiT, with a relative position bias per layer or shared."""

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Compute self-attention over `x` [B, T, C]; the bias is [1, H, T, T] or None."""
        bias = shared_rel_pos_bias
        if self.relative_position_bias_table is not None:
            own = self._get_rel_pos_bias()
            bias = own if bias is None else own + bias
        return ComposedTimmModule.forward(self, x, bias)


class ComposedWindowAttention(ComposedTimmModule, WindowAttention):
    """Attention of Swin: windows with relative position bias, and masks for shifted windows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within windows `x` [B windows, T, C]; the mask is [windows, T, T], added to the scores, or None."""
        bias = self._get_rel_pos_bias()
        if mask is not None:
            bias = bias + mask.repeat(x.shape[0] // mask.shape[0], 1, 1).unsqueeze(1)
        return ComposedTimmModule.forward(self, x, bias)


class ComposedPooling(DCCrossAttention, AttentionPoolLatent):
    """Composed attention pooling (`global_pool="map"`): learned queries attend to the tokens.

    Args:
        pooling: The replaced module, whose parameters are shared.
        **options: `impl` and options of `DCCrossAttention`.
    """

    def __init__(self, pooling: AttentionPoolLatent, **options) -> None:
        nn.Module.__init__(self)
        share_parameters(self, pooling)
        check_names(options, (*COMPOSE_OPTIONS, "impl"))
        self._set_options(**options)
        self.dim, self.context_dim = self.latent_dim, self.kv.in_features
        self.attn_drop = nn.Dropout(0.0)
        dd = {"device": self.kv.weight.device, "dtype": self.kv.weight.dtype}
        options = compose_options_of(self.options)
        self.compose = CrossComposeProjection(self.dim, self.context_dim, self.num_heads, **options, **dd)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        """Pool tokens [B, T, C] to [B, out_features]; the mask is broadcastable to [B, H, queries, T]."""
        if self.pos_embed is not None:
            x = x + self.pos_embed.unsqueeze(0).to(x.dtype)
        x = DCCrossAttention.forward(self, self.latent.expand(x.shape[0], -1, -1), x, attn_mask=attn_mask)
        if self.mlp is not None:
            x = x + self.mlp(self.norm(x))
        if self.pool == "token":
            return x[:, 0]
        return x.mean(1) if self.pool == "avg" else x


FAMILIES: dict[type[nn.Module], type[ComposedTimmModule]] = {
    Attention: ComposedAttention,
    AttentionRope: ComposedRopeAttention,
    EvaAttention: ComposedEvaAttention,
    BeitAttention: ComposedBeitAttention,
    WindowAttention: ComposedWindowAttention,
}
