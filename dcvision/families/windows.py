"""Attention within windows: Swin V2 (cosine attention), Swin V2 CR, and the local attention of Twins."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import AttentionParts, Family, heads, join, one_width, output, project

MAX_LOG_SCALE = math.log(100.0)  # cosine attention


def _cosine(q: Tensor, k: Tensor, log_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Normalize q and k; the scale per head is applied to q, because the operator has a single scale."""
    scale = log_scale.reshape(1, -1, 1, 1).clamp(max=MAX_LOG_SCALE).exp()
    return F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)


def _with_mask(bias: Tensor, mask: Tensor | None, rows: int) -> Tensor:
    """Add the mask of shifted windows [windows, T, T] to a bias [1, H, T, T], for `rows` windows of all images."""
    if mask is None:
        return bias
    return bias + mask.repeat(rows // mask.shape[0], 1, 1).unsqueeze(1)


def _swin_v2(module: nn.Module, x: Tensor, mask: Tensor | None = None) -> AttentionParts:
    bias = None if module.q_bias is None else torch.cat((module.q_bias, module.k_bias, module.v_bias))
    q, k, v = (heads(part, module.num_heads) for part in F.linear(x, module.qkv.weight, bias).chunk(3, -1))
    q, k = _cosine(q, k, module.logit_scale)
    return AttentionParts(q, k, v, x, x, partial(output, module), _with_mask(_swin_v2_bias(module), mask, len(x)))


def _swin_v2_bias(module: nn.Module) -> Tensor:
    """Compute the continuous relative position bias [1, H, T, T]."""
    tokens = module.window_size[0] * module.window_size[1]
    table = module.cpb_mlp(module.relative_coords_table).view(-1, module.num_heads)
    bias = table[module.relative_position_index.view(-1)].view(tokens, tokens, -1)
    return 16 * torch.sigmoid(bias.permute(2, 0, 1))[None]


def _swin_v2_cr(module: nn.Module, x: Tensor, mask: Tensor | None = None) -> AttentionParts:
    q, k, v = project(module, x)
    q, k = _cosine(q, k, module.logit_scale)
    bias = module._relative_positional_encodings()
    return AttentionParts(q, k, v, x, x, partial(output, module), _with_mask(bias, mask, len(x)))


def _twins_local(module: nn.Module, x: Tensor, size: tuple[int, int]) -> AttentionParts:
    """Tokens are zero-padded to full windows; padding is attended to, as in timm."""
    (height, width), side = size, module.ws
    padded = F.pad(x.unflatten(1, (height, width)), (0, 0, 0, -width % side, 0, -height % side))
    grid = padded.unflatten(2, (-1, side)).unflatten(1, (-1, side)).transpose(2, 3)  # [B, rows, columns, ws, ws, C]
    tokens = grid.flatten(0, 2).flatten(1, 2)

    def finish(attended: Tensor) -> Tensor:
        joined = join(attended).view(grid.shape).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return module.proj_drop(module.proj(joined[:, :height, :width].flatten(1, 2)))

    return AttentionParts(*project(module, tokens), tokens, tokens, finish)


SWIN_V2 = Family(_swin_v2, one_width, scale=lambda module: 1.0)
SWIN_V2_CR = Family(_swin_v2_cr, one_width, scale=lambda module: 1.0)
TWINS_LOCAL = Family(_twins_local, one_width)
