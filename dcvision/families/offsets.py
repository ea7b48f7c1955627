"""Attention with a learned bias per relative offset, and values wider than the keys: TinyViT, LeViT,
EfficientFormer."""

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from .base import AttentionParts, AttentionWidths, Family, as_image, as_tokens, heads, join
from .talking_heads import constant_of, static_mixing


def _parts(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *others) -> AttentionParts:
    """Create parts from q, k [B, H, T, D] and v [B, H, S, E]. Queries and keys are zero-padded to the width E of the
    values, because the operator has a single head dim; scores are unchanged.
    """
    q, k = (F.pad(part, (0, v.shape[-1] - part.shape[-1])) for part in (q, k))
    parts = AttentionParts(q, k, v, *others)
    return parts if parts.bias is not None else parts._replace(bias=_bias(module, q))


def _bias(module: nn.Module, q: Tensor) -> Tensor:
    """Return the bias [1, H, T, S] of relative offsets."""
    return module.get_attention_biases(q.device)[None]


def _split(module: nn.Module, x: Tensor, *widths: int) -> tuple[Tensor, ...]:
    """Split [B, T, H D] head by head into parts of these widths."""
    return heads(x, module.num_heads).split(widths, -1)


def _tiny_vit(module: nn.Module, x: Tensor) -> AttentionParts:
    tokens = module.norm(x)
    q, k, v = _split(module, module.qkv(tokens), module.key_dim, module.key_dim, module.val_dim)
    return _parts(module, q, k, v, tokens, tokens, lambda attended: module.proj(join(attended)))


def _efficientformer(module: nn.Module, x: Tensor) -> AttentionParts:
    q, k, v = _split(module, module.qkv(x), module.key_dim, module.key_dim, module.val_dim)
    return _parts(module, q, k, v, x, x, lambda attended: module.proj(join(attended)))


def _levit(module: nn.Module, x: Tensor) -> AttentionParts:
    """Tokens [B, T, C], or images [B, C, h, w] in convolutional models."""
    qkv, tokens = module.qkv(x), x
    if module.use_conv:
        qkv, tokens = as_tokens(qkv), as_tokens(x)
    q, k, v = _split(module, qkv, module.key_dim, module.key_dim, module.val_dim)
    return _parts(module, q, k, v, tokens, tokens, partial(_levit_output, module, x.shape[2:]))


def _levit_down(module: nn.Module, x: Tensor) -> AttentionParts:
    """There are fewer queries than keys."""
    down = module.q.down(x)
    q, kv, queries, keys, size = module.q.ln(down), module.kv(x), down, x, down.shape[2:]
    if module.use_conv:
        q, kv, queries, keys = (as_tokens(part) for part in (q, kv, queries, keys))
    k, v = _split(module, kv, module.key_dim, module.val_dim)
    q = heads(q, module.num_heads)
    return _parts(module, q, k, v, queries, keys, partial(_levit_output, module, size))


def _levit_output(module: nn.Module, size: tuple[int, int], attended: Tensor) -> Tensor:
    joined = join(attended)
    return module.proj(as_image(joined, size) if module.use_conv else joined)


def _efficientformer_v2(module: nn.Module, x: Tensor) -> AttentionParts:
    """Images [B, C, h, w], with static mixing of the scores, after the bias, and of the weights."""
    if module.stride_conv is not None:
        x = module.stride_conv(x)
    tokens, size, value = as_tokens(x), x.shape[2:], module.v(x)
    q, k, v = (heads(as_tokens(part), module.num_heads) for part in (module.q(x), module.k(x), value))
    scores, weights = (talking.weight.flatten(1) for talking in (module.talking_head1, module.talking_head2))
    bias = (scores @ _bias(module, q).flatten(2)).view(1, module.num_heads, q.shape[2], k.shape[2])
    pre, post = static_mixing(scores), static_mixing(weights)

    def finish(attended: Tensor) -> Tensor:
        made = as_image(join(attended + constant_of(module.talking_head2.bias, v)), size) + module.v_local(value)
        return module.proj(module.act(made if module.upsample is None else module.upsample(made)))

    return _parts(module, q, k, v, tokens, tokens, finish, bias, pre, post)


def _efficientformer_v2_down(module: nn.Module, x: Tensor) -> AttentionParts:
    """Queries are downsampled by two."""
    queries, keys, value, query = as_tokens(x[..., ::2, ::2]), as_tokens(x), module.v(x), module.q(x)
    q, k, v = (heads(as_tokens(part), module.num_heads) for part in (query, module.k(x), value))

    def finish(attended: Tensor) -> Tensor:
        return module.proj(module.act(as_image(join(attended), query.shape[2:]) + module.v_local(value)))

    return _parts(module, q, k, v, queries, keys, finish)


def _levit_down_widths(module: nn.Module) -> AttentionWidths:
    width = module.kv.linear.weight.shape[1]
    return AttentionWidths(width, width)


def _efficientformer_v2_down_widths(module: nn.Module) -> AttentionWidths:
    width = module.k.conv.in_channels
    return AttentionWidths(width, width)


TINY_VIT = Family(_tiny_vit, lambda module: AttentionWidths(module.qkv.in_features))
EFFICIENTFORMER = Family(_efficientformer, lambda module: AttentionWidths(module.qkv.in_features))
LEVIT = Family(_levit, lambda module: AttentionWidths(module.qkv.linear.weight.shape[1]))
LEVIT_DOWN = Family(_levit_down, _levit_down_widths)
EFFICIENTFORMER_V2 = Family(
    _efficientformer_v2, lambda module: AttentionWidths(module.q.conv.in_channels), mixes_heads=True
)
EFFICIENTFORMER_V2_DOWN = Family(_efficientformer_v2_down, _efficientformer_v2_down_widths)
