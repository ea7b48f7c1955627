"""Attention with relative position biases: SAM's, the RelPos vision transformers, MaxViT and CoAtNet."""

from functools import partial

from timm.layers import apply_rot_embed_cat
from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias
from torch import Tensor, nn

from .base import (
    AttentionParts,
    AttentionWidths,
    Family,
    as_tokens,
    conv_output,
    one_width,
    output,
    project,
    split_by_order,
)


def _sam(module: nn.Module, x: Tensor) -> AttentionParts:
    """Images or windows [B, h, w, C]; the bias depends on the queries."""
    size, tokens = x.shape[1:3], x.flatten(1, 2)
    q, k, v = project(module, tokens)
    q, k, bias = module.q_norm(q), module.k_norm(k), None
    if module.use_rel_pos:
        tables = (module.rel_pos_h, module.rel_pos_w)
        bias = get_decomposed_rel_pos_bias(q.flatten(0, 1), *tables, size, size).unflatten(0, q.shape[:2])
    elif module.rope is not None:
        q, k = (apply_rot_embed_cat(part, module.rope.get_embed()).type_as(v) for part in (q, k))
    return AttentionParts(q, k, v, tokens, tokens, lambda attended: output(module, attended).unflatten(1, size), bias)


def _bias(module: nn.Module, shared: Tensor | None) -> Tensor | None:
    return shared if module.rel_pos is None else module.rel_pos.get_bias()


def _rel_pos(module: nn.Module, x: Tensor, shared_rel_pos: Tensor | None = None) -> AttentionParts:
    q, k, v = project(module, x)
    q, k = module.q_norm(q), module.k_norm(k)
    return AttentionParts(q, k, v, x, x, partial(output, module), _bias(module, shared_rel_pos))


def _maxvit(module: nn.Module, x: Tensor, shared_rel_pos: Tensor | None = None) -> AttentionParts:
    """Windows or grids [B, h, w, C]."""
    tokens, size = x.flatten(1, -2), x.shape[1:-1]

    def finish(attended: Tensor) -> Tensor:
        return output(module, attended).unflatten(1, size)

    return AttentionParts(
        *split_by_order(module, module.qkv(tokens)), tokens, tokens, finish, _bias(module, shared_rel_pos)
    )


def _coatnet(module: nn.Module, x: Tensor, shared_rel_pos: Tensor | None = None) -> AttentionParts:
    """Images [B, C, h, w]."""
    tokens, parts = as_tokens(x), split_by_order(module, as_tokens(module.qkv(x)))
    finish = partial(conv_output, module, size=x.shape[2:])
    return AttentionParts(*parts, tokens, tokens, finish, _bias(module, shared_rel_pos))


SAM = Family(_sam, one_width)
REL_POS = Family(_rel_pos, one_width)
MAXVIT = Family(_maxvit, one_width)
COATNET = Family(_coatnet, lambda module: AttentionWidths(module.qkv.in_channels))
