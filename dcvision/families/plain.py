"""Attention that differs from a plain ViT's only in token layout or source of the queries.

MetaFormer (CAFormer), NesT, FastViT, Visformer, TNT, CrossViT, GC ViT and Gemma 4's image tower.
"""

from functools import partial

from timm.models.gemma4_vit import apply_multidimensional_rope
from torch import Tensor, nn

from .base import (
    AttentionParts,
    AttentionWidths,
    Family,
    as_image,
    as_tokens,
    conv_output,
    heads,
    join,
    one_width,
    output,
    project,
)


def _metaformer(module: nn.Module, x: Tensor) -> AttentionParts:
    return AttentionParts(*project(module, x), x, x, partial(output, module))


def _nest(module: nn.Module, x: Tensor) -> AttentionParts:
    """Blocks [B, blocks, T, C] with attention within each block; the output projection expects channels before
    heads."""
    tokens = x.flatten(0, 1)

    def finish(attended: Tensor) -> Tensor:
        joined = attended.permute(0, 2, 3, 1).flatten(2)
        return module.proj_drop(module.proj(joined)).unflatten(0, x.shape[:2])

    return AttentionParts(*project(module, tokens), tokens, tokens, finish)


def _fastvit(module: nn.Module, x: Tensor) -> AttentionParts:
    """Images [B, C, h, w], projected as tokens."""
    tokens, size = as_tokens(x), x.shape[2:]
    return AttentionParts(
        *project(module, tokens), tokens, tokens, lambda attended: as_image(output(module, attended), size)
    )


def _visformer(module: nn.Module, x: Tensor) -> AttentionParts:
    """Images [B, C, h, w], projected by convolutions."""
    tokens = as_tokens(x)
    q, k, v = (heads(part, module.num_heads) for part in as_tokens(module.qkv(x)).chunk(3, -1))
    return AttentionParts(q, k, v, tokens, tokens, partial(conv_output, module, size=x.shape[2:]))


def _tnt(module: nn.Module, x: Tensor) -> AttentionParts:
    q, k = (heads(part, module.num_heads) for part in module.qk(x).chunk(2, -1))
    return AttentionParts(q, k, heads(module.v(x), module.num_heads), x, x, partial(output, module))


def _crossvit(module: nn.Module, x: Tensor) -> AttentionParts:
    """The first token of [B, S, C] attends to all."""
    first = x[:, :1]
    q, k, v = (heads(part, module.num_heads) for part in (module.wq(first), module.wk(x), module.wv(x)))
    return AttentionParts(q, k, v, first, x, partial(output, module))


def _gcvit(module: nn.Module, x: Tensor, q_global: Tensor | None = None) -> AttentionParts:
    """Windows [B windows, T, C]; global queries [B, T, C], one set per image, are not projected."""
    bias = module.rel_pos.get_bias()
    if not module.use_global:
        return AttentionParts(*project(module, x), x, x, partial(output, module), bias)
    queries = q_global.repeat_interleave(len(x) // len(q_global), dim=0).reshape(x.shape)
    k, v = (heads(part, module.num_heads) for part in module.qkv(x).chunk(2, -1))
    return AttentionParts(heads(queries, module.num_heads), k, v, queries, x, partial(output, module), bias)


def _gemma4(
    module: nn.Module, x: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None
) -> AttentionParts:
    """Keys and values may be shared by several heads."""
    q, k, v = (
        norm(projection(x).unflatten(-1, (-1, module.head_dim)))
        for projection, norm in (
            (module.q_proj, module.q_norm),
            (module.k_proj, module.k_norm),
            (module.v_proj, module.v_norm),
        )
    )
    q, k = (apply_multidimensional_rope(part, rope_cos, rope_sin, ndim=2, unsqueeze_dim=2) for part in (q, k))
    k, v = (part.repeat_interleave(module.num_kv_groups, dim=2) for part in (k, v))

    def finish(attended: Tensor) -> Tensor:
        return module.proj_drop(module.o_proj(join(attended)))

    return AttentionParts(*(part.transpose(1, 2) for part in (q, k, v)), x, x, finish, attn_mask)


def _gcvit_widths(module: nn.Module) -> AttentionWidths:
    width = module.qkv.in_features
    return AttentionWidths(width, width if module.use_global else None)


METAFORMER = Family(_metaformer, one_width)
NEST = Family(_nest, one_width)
FASTVIT = Family(_fastvit, one_width)
VISFORMER = Family(_visformer, lambda module: AttentionWidths(module.qkv.in_channels))
TNT = Family(_tnt, lambda module: AttentionWidths(module.qk.in_features))
CROSSVIT = Family(_crossvit, lambda module: AttentionWidths(module.wq.in_features, module.wk.in_features))
GCVIT = Family(_gcvit, _gcvit_widths)
GEMMA4 = Family(_gemma4, lambda module: AttentionWidths(module.o_proj.linear.out_features), scale=lambda module: 1.0)
