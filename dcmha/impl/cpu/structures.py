"""Arguments of the C++ functions: the structures of `attention.cpp`, filled from tensors."""

# B batch, T query tokens, S key tokens, H heads, D head dim, G head groups

from collections.abc import Sequence
from ctypes import Structure, c_double, c_int64, c_void_p, sizeof

import torch
from torch import Tensor

from ...weights import ComposeWeights, SideWeights
from ..call import AttentionCall
from ..flatten import PARTS, flat_weights


class Matrix(Structure):
    """Float32 [B, H, tokens, D] with a contiguous last axis."""

    _fields_ = (("data", c_void_p), ("row", c_int64), ("head", c_int64), ("token", c_int64))


class Weight(Structure):
    """Float32 [B, tokens, R, H] or [B, tokens, H] with a contiguous last axis."""

    _fields_ = (("data", c_void_p), ("row", c_int64), ("token", c_int64), ("rank", c_int64), ("ranks", c_int64))


class Composition(Structure):
    """Weights of a composition: down, up and gate of each side, and a contiguous base."""

    _fields_ = (("exists", c_int64), ("query", Weight * 3), ("key", Weight * 3), ("base", c_void_p))


NO_WEIGHT = (0,) * len(Weight._fields_)
TwoCompositions = Composition * 2
Words = c_int64 * (sizeof(TwoCompositions) // 8)  # all fields have 8 bytes


class Mask(Structure):
    """[B, H, T, S], bytes or float32, with contiguous rows of keys; stride 0 along broadcast axes."""

    _fields_ = (("data", c_void_p), ("row", c_int64), ("head", c_int64), ("query", c_int64))


class Call(Structure):
    """Arguments of both passes; those from `d_out` on are of the backward pass only."""

    _fields_ = (
        *((name, c_int64) for name in ("B", "H", "G", "shared", "T", "S", "D", "threads", "parts", "slots", "shares")),
        *(("is_causal", c_int64), ("window", c_int64), ("scale", c_double)),
        *((name, Matrix) for name in ("q", "k", "v", "out")),
        *(("softmax", c_void_p), ("sums", c_void_p), ("compositions", TwoCompositions)),
        *(("visible", Mask), ("bias", Mask)),
        *((name, Matrix) for name in ("d_out", "dq", "dk", "dv")),
        *(("gradients", TwoCompositions), ("d_bias", Mask), ("d_bias_slot", c_int64)),
    )


def dense_call(call: AttentionCall) -> AttentionCall:
    """Convert a call to float32, with contiguous last axes and bases, and masks expanded along the keys."""
    S = call.k.shape[2]
    return call._replace(
        q=dense(call.q),
        k=dense(call.k),
        v=dense(call.v),
        pre=_dense_weights(call.pre),
        post=_dense_weights(call.post),
        visible=full_rows(call.visible, S),
        bias=full_rows(call.bias, S),
    )


def _dense_weights(weights: ComposeWeights | None) -> ComposeWeights | None:
    if weights is None:
        return None
    query, key = (SideWeights(*map(dense, side)) for side in (weights.query, weights.key))
    return ComposeWeights(query, key, None if weights.base is None else dense(weights.base).contiguous())


def dense(x: Tensor | None) -> Tensor | None:
    """Convert to float32 with a contiguous last axis."""
    if x is None:
        return None
    x = x if x.dtype == torch.float32 else x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


def full_rows(mask: Tensor | None, S: int) -> Tensor | None:
    """Expand a mask along the keys."""
    if mask is None:
        return None
    mask = mask.expand(*mask.shape[:-1], S)
    return mask.contiguous() if mask.dtype == torch.bool else mask.float().contiguous()


def matrix(x: Tensor) -> Matrix:
    """`Matrix` of [B, H, tokens, D]."""
    return Matrix(x.data_ptr(), *x.stride()[:3])


def mask(x: Tensor | None) -> Mask:
    """`Mask` of [B, H, T, S]."""
    if x is None:
        return Mask()
    strides = zip(x.shape[:3], x.stride()[:3], strict=True)
    return Mask(x.data_ptr(), *(0 if size == 1 else stride for size, stride in strides))


def compositions(call: AttentionCall) -> Sequence[Composition]:
    """Both compositions of a call."""
    return compositions_from([*flat_weights(call.pre), *flat_weights(call.post)])


def compositions_from(weights: Sequence[Tensor | None]) -> Sequence[Composition]:
    """Both compositions, from their weights or their gradients in the order of `flat_weights`."""
    values = [*_composition(weights[: len(PARTS)]), *_composition(weights[len(PARTS) :])]
    return TwoCompositions.from_buffer(Words(*values))  # half the time of building each structure


def _composition(weights: Sequence[Tensor | None]) -> list[int]:
    """Values of `Composition`, in order."""
    *sides, base = weights
    values = [int(any(w is not None for w in weights))]
    for w in sides:
        values += NO_WEIGHT if w is None else _weight(w)
    return [*values, 0 if base is None else base.data_ptr()]


def _weight(w: Tensor) -> tuple[int, ...]:
    """Values of `Weight`, in order."""
    row, token, *rank = w.stride()[:-1]
    return w.data_ptr(), row, token, rank[0] if rank else 0, w.shape[2] if rank else 1
