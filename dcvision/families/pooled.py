"""Attention whose queries or keys are pooled tokens: PVT v2, Twins, Next-ViT, MViT v2, Hiera and SAM 2."""

from collections.abc import Sequence
from functools import partial

from timm.models.mvitv2 import cal_rel_pos_type, reshape_post_pool, reshape_pre_pool
from torch import Tensor, nn

from .base import AttentionParts, AttentionWidths, Family, as_image, as_tokens, heads, join, output, project


def _of_reduced(module: nn.Module, x: Tensor, reduced: Tensor) -> AttentionParts:
    """Queries of tokens [B, T, C], keys and values of reduced ones [B, S, C]."""
    q = heads(module.q(x), module.num_heads)
    k, v = (heads(part, module.num_heads) for part in module.kv(reduced).chunk(2, -1))
    return AttentionParts(q, k, v, x, reduced, partial(output, module))


def _pvt(module: nn.Module, x: Tensor, feat_size: Sequence[int]) -> AttentionParts:
    reduced = x
    if module.pool is not None:
        reduced = module.act(module.norm(as_tokens(module.sr(module.pool(as_image(x, feat_size))))))
    elif module.sr is not None:
        reduced = module.norm(as_tokens(module.sr(as_image(x, feat_size))))
    return _of_reduced(module, x, reduced)


def _twins_global(module: nn.Module, x: Tensor, size: Sequence[int]) -> AttentionParts:
    reduced = x if module.sr is None else module.norm(as_tokens(module.sr(as_image(x, size))))
    return _of_reduced(module, x, reduced)


def _nextvit(module: nn.Module, x: Tensor) -> AttentionParts:
    reduced = x if module.sr is None else module.norm(module.sr(x.transpose(1, 2))).transpose(1, 2)
    q, k, v = (heads(part, module.num_heads) for part in (module.q(x), module.k(reduced), module.v(reduced)))
    return AttentionParts(q, k, v, x, reduced, partial(output, module))


def _mvit(module: nn.Module, x: Tensor, feat_size: Sequence[int]) -> AttentionParts:
    """Heads are pooled separately; concatenated they are the tokens for the compose weights."""
    q, k, v = project(module, x)
    (q, q_size), (k, k_size), (v, _) = (
        _pool_heads(module, part, name, feat_size) for part, name in ((q, "q"), (k, "k"), (v, "v"))
    )
    bias = None
    if module.rel_pos_type == "spatial":
        scores = q.new_zeros(*q.shape[:3], k.shape[2])
        tables = (module.rel_pos_h, module.rel_pos_w)
        bias = cal_rel_pos_type(scores, q, module.has_cls_token, q_size, k_size, *tables)

    def finish(attended: Tensor) -> tuple[Tensor, list[int]]:
        return module.proj(join(attended + q if module.residual_pooling else attended)), q_size

    return AttentionParts(q, k, v, join(q), join(k), finish, bias)


def _pool_heads(module: nn.Module, x: Tensor, name: str, size: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Pool and normalize heads [B, H, T, D] of q, k or v; the class token is not pooled."""
    pool, norm = getattr(module, f"pool_{name}"), getattr(module, f"norm_{name}")
    if pool is not None:
        grid, token = reshape_pre_pool(x, size, module.has_cls_token)
        x, size = reshape_post_pool(pool(grid), module.num_heads, token)
    return x if norm is None else norm(x), list(size)


def _hiera(module: nn.Module, x: Tensor) -> AttentionParts:
    """Tokens [B, T, C] are ordered (token within unit, unit); queries are max-pooled over `q_stride` tokens."""
    units = x.shape[1] // (module.q_stride * module.window_size) if module.use_mask_unit_attn else 1
    tokens = x.unflatten(1, (-1, units)).transpose(1, 2).flatten(0, 1)
    q, k, v = (heads(part, module.heads) for part in module.qkv(tokens).chunk(3, -1))
    queries = tokens
    if module.q_stride > 1:
        q = q.unflatten(2, (module.q_stride, -1)).amax(2)
        queries = tokens.unflatten(1, (module.q_stride, -1)).amax(1)

    def finish(attended: Tensor) -> Tensor:
        return module.proj(join(attended).unflatten(0, (-1, units)).transpose(1, 2).flatten(1, 2))

    return AttentionParts(q, k, v, queries, tokens, finish)


def _sam2(module: nn.Module, x: Tensor) -> AttentionParts:
    """Windows [B, h, w, C]; queries are pooled as images."""
    tokens, size = x.flatten(1, 2), x.shape[1:3]
    q, k, v = module.qkv(tokens).chunk(3, -1)
    queries = tokens
    if module.q_pool is not None:
        pooled = module.q_pool(as_image(q, size))
        q, queries = as_tokens(pooled), as_tokens(module.q_pool(as_image(tokens, size)))
        size = pooled.shape[2:]
    q, k, v = (heads(part, module.num_heads) for part in (q, k, v))
    return AttentionParts(q, k, v, queries, tokens, lambda attended: module.proj(join(attended)).unflatten(1, size))


def _widths_if(is_pooled: bool, width: int) -> AttentionWidths:
    return AttentionWidths(width, width if is_pooled else None)


PVT = Family(_pvt, lambda module: AttentionWidths(module.q.in_features, module.kv.in_features))
TWINS_GLOBAL = PVT._replace(parts=_twins_global)
NEXTVIT = Family(_nextvit, lambda module: AttentionWidths(module.q.in_features, module.k.in_features))
MVIT = Family(_mvit, lambda module: AttentionWidths(module.qkv.out_features // 3, module.qkv.out_features // 3))
HIERA = Family(_hiera, lambda m: _widths_if(m.q_stride > 1, m.qkv.in_features), heads="heads")
SAM2 = Family(_sam2, lambda m: _widths_if(m.q_pool is not None, m.qkv.in_features))
