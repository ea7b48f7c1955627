"""Attention of MobileNet v4 and v5, including multi-query attention."""

from functools import partial

from torch import Tensor, nn

from .base import AttentionParts, AttentionWidths, Family, as_image, as_tokens, conv_output, heads, join, split_by_order


def _multi_query(module: nn.Module, x: Tensor, attn_mask: Tensor | None = None) -> AttentionParts:
    """Images [B, C, h, w]; queries may be pooled, keys and values may be downsampled."""
    query, key = module.query[:-1](x), module.key[:-1](x)  # inputs of the projections
    q = heads(as_tokens(module.query[-1](query)), module.num_heads)
    shared = (as_tokens(part)[:, None] for part in (module.key[-1](key), module.value(x)))
    k, v = (part.expand(-1, module.num_heads, -1, -1) for part in shared)

    def finish(attended: Tensor) -> Tensor:
        return module.output(as_image(join(attended), query.shape[2:]))

    return AttentionParts(q, k, v, as_tokens(query), as_tokens(key), finish, attn_mask)


def _multi_query_widths(module: nn.Module) -> AttentionWidths:
    is_one = not module.has_query_strides and module.kv_stride == 1
    return AttentionWidths(module.query.proj.in_channels, None if is_one else module.key.proj.in_channels)


def _of_images(module: nn.Module, x: Tensor, attn_mask: Tensor | None = None) -> AttentionParts:
    """Images [B, C, h, w]."""
    tokens, parts = as_tokens(x), split_by_order(module, as_tokens(module.qkv(x)))
    return AttentionParts(*parts, tokens, tokens, partial(conv_output, module, size=x.shape[2:]), attn_mask)


MULTI_QUERY = Family(_multi_query, _multi_query_widths)
OF_IMAGES = Family(
    _of_images, lambda module: AttentionWidths(module.qkv.in_channels), scale=lambda module: module.dim_head**-0.5
)
