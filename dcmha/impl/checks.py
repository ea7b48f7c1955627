"""Argument checks of `composed_attention`."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from numbers import Real

import torch
from torch import Tensor

from ..checks import check_booleans, is_integer
from ..weights import ComposeWeights, SideWeights
from .masking import DocumentBounds

MAX_WINDOW, MAX_SCALE = 2**63, 2e38  # index range of the kernels; float32 range divided by log2(e)


def check_types(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
) -> None:
    """Check the Python types of the tensors and weights.

    Raises:
        ValueError: If a composition is not a `ComposeWeights` of `SideWeights`.
        TypeError: If an input is not a tensor.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and (x is not None or name != "attn_mask"):
            raise TypeError(f"{name} is {type(x).__name__}; expected a tensor.")
    for name, weights in (("pre", pre), ("post", post)):
        _check_weights_type(name, weights)


def check_values(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pre: ComposeWeights | None,
    post: ComposeWeights | None,
    attn_mask: Tensor | None,
    document_ids: Tensor | DocumentBounds | None,
    is_causal: bool,
    window_size: int | None,
    scale: float | None,
    dropout_p: float,
    num_groups: int,
) -> None:
    """Check shapes, dtypes, devices and options, after autocast.

    Raises:
        ValueError: If one is invalid.
        TypeError: If `attn_mask` is neither boolean nor floating, or `document_ids` is not a tensor.
    """
    _check_qkv(q, k, v)
    _check_documents(document_ids, q, k)
    _check_options(q, is_causal, window_size, scale, dropout_p, num_groups)
    _check_weights("pre", pre, q, k, num_groups)
    _check_weights("post", post, q, k, num_groups)
    check_mask(attn_mask, (*q.shape[:3], k.shape[2]), q.device)


def check_mask(attn_mask: Tensor | None, full: tuple[int, ...], device: torch.device) -> None:
    """Check the type, shape [B, H, T, S], device and dtype of a mask.

    Raises:
        TypeError: If it is not a tensor, or neither boolean nor floating.
        ValueError: If it cannot be broadcast to the shape, or is on another device.
    """
    if attn_mask is None:
        return
    if not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask is {type(attn_mask).__name__}; expected a tensor.")
    shape = tuple(attn_mask.shape)
    fits = len(shape) <= 4
    for got, wanted in zip(reversed(shape), reversed(full), strict=False):
        fits = fits and (got == 1 or got == wanted)  # torch 2.9 compiles neither all() nor sizes in tuples
    if not fits:
        raise ValueError(f"attn_mask has shape {list(shape)}; expected broadcastable to [B, H, T, S] = {list(full)}.")
    if attn_mask.device != device:
        raise ValueError(f"attn_mask is on {attn_mask.device}; expected the device of q, {device}.")
    if attn_mask.dtype != torch.bool and not attn_mask.is_floating_point():
        raise TypeError(f"attn_mask has dtype {attn_mask.dtype}; expected torch.bool (True = may attend) or floating.")


def check_window_size(window_size: int | None) -> None:
    """Raise ValueError unless a window size is an integer of at least 1, or None."""
    if window_size is not None and (not is_integer(window_size) or not 1 <= window_size < MAX_WINDOW):
        raise ValueError(
            f"window_size={window_size!r} must be an integer, at least 1 (the query's own position), or None."
        )


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {list(x.shape)}; expected four axes [B, H, tokens, D].")
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}; expected a floating dtype.")
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape [B, H / g, S, D]; got {list(k.shape)} and {list(v.shape)}.")
    if q.shape[1] < 1 or q.shape[3] < 1 or k.shape[1] < 1:
        raise ValueError(
            f"q and k have shapes {list(q.shape)}, {list(k.shape)}; expected at least one head and channel."
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]) or q.shape[1] % k.shape[1]:
        got = f"got q {list(q.shape)} and k {list(k.shape)}"
        raise ValueError(f"q and k must agree in B and D, and the heads of k divide those of q; {got}.")
    if not (q.dtype == k.dtype == v.dtype) or not (q.device == k.device == v.device):
        got = ", ".join(f"{name} {x.dtype} on {x.device}" for name, x in (("q", q), ("k", k), ("v", v)))
        raise ValueError(f"q, k and v must have one dtype and device; got {got}.")


def _check_documents(document_ids: Tensor | DocumentBounds | None, q: Tensor, k: Tensor) -> None:
    if document_ids is None:
        return
    B, S = k.shape[0], k.shape[2]
    named = {"document_ids": document_ids}
    if isinstance(document_ids, DocumentBounds):
        named = {"document_ids.starts": document_ids.starts, "document_ids.stops": document_ids.stops}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} is {type(x).__name__}; expected a tensor.")
        is_integral = not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)
        if tuple(x.shape) != (B, S) or not is_integral or x.device != q.device:
            got = f"{x.dtype} {list(x.shape)} on {x.device}"
            raise ValueError(f"{name} is {got}; expected integers [B, S] = [{B}, {S}] on {q.device}, the device of q.")
    if q.shape[2] > S:
        raise ValueError(f"document_ids require T <= S; got T = {q.shape[2]} and S = {S}.")


def _check_options(
    q: Tensor, is_causal: bool, window_size: int | None, scale: float | None, dropout_p: float, num_groups: int
) -> None:
    check_booleans(is_causal=is_causal)
    check_window_size(window_size)
    if not isinstance(dropout_p, Real) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p!r} must be in [0, 1).")
    if scale is not None and not isinstance(scale, torch.SymFloat):
        is_number = isinstance(scale, Real) and not isinstance(scale, bool)
        if not is_number or not -MAX_SCALE < scale < MAX_SCALE:
            raise ValueError(f"scale={scale!r} must be a finite number, or None.")
    if not is_integer(num_groups) or num_groups < 1 or q.shape[1] % num_groups:
        raise ValueError(f"num_groups={num_groups} must be a positive divisor of the {q.shape[1]} heads of q.")


def _check_weights_type(name: str, weights: ComposeWeights | None) -> None:
    if weights is None:
        return
    if not isinstance(weights, ComposeWeights):
        raise ValueError(f"{name} is {type(weights).__name__}; expected ComposeWeights(query, key, base), or None.")
    for side, part in (("query", weights.query), ("key", weights.key)):
        if not isinstance(part, SideWeights):
            raise ValueError(f"{name}.{side} is {type(part).__name__}; expected SideWeights (each field may be None).")
        for weight in part:
            if weight is not None and not isinstance(weight, Tensor):
                raise TypeError(f"{name}.{side} holds {[type(w).__name__ for w in part]}; expected tensors and None.")
    if weights.base is not None and not isinstance(weights.base, Tensor):
        raise TypeError(f"{name}.base is {type(weights.base).__name__}; expected a tensor, or None.")


def _check_weights(name: str, weights: ComposeWeights | None, q: Tensor, k: Tensor, num_groups: int) -> None:
    if weights is None:
        return
    B, H, T, _ = q.shape
    for side, part, tokens in (("query", weights.query, T), ("key", weights.key, k.shape[2])):
        if (part.down is None) != (part.up is None):
            raise ValueError(f"{name}.{side}.down and {name}.{side}.up must both be given or both be None.")
        if part.down is not None:
            rank = part.down.shape[2] if part.down.dim() == 4 else "R"
            _check_weight(f"{name}.{side}.down", part.down, "rank", (B, tokens, rank, H), q)
            _check_weight(f"{name}.{side}.up", part.up, "rank", (B, tokens, rank, H), q)
        _check_weight(f"{name}.{side}.gate", part.gate, "gate", (B, tokens, H), q)
    group = H // num_groups
    _check_weight(f"{name}.base", weights.base, "base", (num_groups, group, group), q)


_WEIGHT_AXES = {"rank": "[B, tokens, R, H]", "gate": "[B, tokens, H]", "base": "[G, H/G, H/G]"}


def _check_weight(name: str, weight: Tensor | None, kind: str, shape: tuple, q: Tensor) -> None:
    if weight is None:
        return
    if tuple(weight.shape) != shape:
        accepted = f"{_WEIGHT_AXES[kind]} = [{', '.join(map(str, shape))}]"
        raise ValueError(f"{name} has shape {list(weight.shape)}; expected {accepted}.")
    if weight.dtype != q.dtype or weight.device != q.device:
        raise ValueError(f"{name} is {weight.dtype} on {weight.device}; expected as q, {q.dtype} on {q.device}.")
