"""The public function for composed attention: checks arguments, selects the implementation, calls it."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from contextlib import nullcontext
from numbers import Real

import torch
import torch.nn.functional as F
from torch import Tensor

from .checks import check_booleans, is_integer, plain_number
from .dispatch import Impl, check_impl, resolve_impl
from .impl.call import AttentionCall, ranks_of
from .impl.masking import DocumentBounds, both_visible, document_bounds, mask_of_documents, visible_keys
from .weights import ComposeWeights, SideWeights

MAX_WINDOW, MAX_SCALE = 2**63, 2e38  # index range of the kernels; float32 range divided by log2(e)

NO_TORCHSCRIPT = "cannot take composed attention; use torch.export, or torch.onnx.export(..., dynamo=True)."


def composed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pre: ComposeWeights | None = None,
    post: ComposeWeights | None = None,
    *,
    attn_mask: Tensor | None = None,
    document_ids: Tensor | DocumentBounds | None = None,
    is_causal: bool = False,
    window_size: int | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    num_groups: int = 1,
    impl: Impl = "auto",
) -> Tensor:
    """Compute attention whose heads are composed before and after the softmax (equation 4).

        scores  = compose(q k^T * scale, pre) + float mask
        weights = compose(softmax over visible keys(scores), post)
        out     = weights v

    where, with dot products over the heads of one group (equation 7, the identity in place of W_b),

        compose(a)(i, j, :) = a + a @ base + sum_r (a . query.down[i, r]) query.up[i, r] + a * query.gate[i]
                                           + sum_r (a . key.down[j, r]) key.up[j, r] + a * key.gate[j]

    Composed weights are not renormalized and may be negative. The output is zero for a query without visible keys. With
    `pre` and `post` both None this is `torch.nn.functional.scaled_dot_product_attention` with the equivalent mask.
    Under autocast all floating inputs are cast to the autocast dtype, as in that function; otherwise all inputs must
    have the same dtype.

    Args:
        q: Queries [B, H, T, D].
        k: Keys [B, H / g, S, D]: g consecutive query heads share one head of the keys and values (grouped-query
            attention).
        v: Values [B, H / g, S, D].
        pre: Composition of the scores; None for none.
        post: Composition of the attention weights; None for none.
        attn_mask: Broadcastable to [B, H, T, S]; boolean (True = may attend), or floating: added after the
            pre-composition, -inf hides a key. Combined by AND with the arguments below.
        document_ids: Document id of each key [B, S], integers: a query attends only to keys of its own document, a run
            of equal ids. Query i is token i + S - T; T <= S. Alternatively the result of `document_bounds`, computed
            once for several calls.
        is_causal: Query i attends to keys j <= i + S - T (aligned to the last key).
        window_size: A query attends to this many keys, including its own position; without `is_causal`, this many on
            each side.
        scale: Factor on q k^T; 1/sqrt(D) if None.
        dropout_p: Probability of dropping a composed weight.
        num_groups: G; heads mix within G equal groups (section 3.2).
        impl: "reference" (dense), "compiled" (chunks of queries), "cpu" (C++, compiled on first use), "triton" (fused
            kernels for CUDA), or "auto": "triton" on CUDA and "cpu" on a CPU if they support the call, else "compiled"
            (`resolve_impl` returns the selection). All compute in float32; "reference" and "compiled" compute in
            float64 for float64 inputs. "triton" stores scores and weights between its kernels in the dtype of the
            inputs. Second and forward-mode derivatives are supported by "reference" and "compiled" (on CUDA by
            "reference" only). Transforms of torch.func are supported by "reference" and "compiled", which "auto" then
            selects; in this case "compiled" does not recompute in the backward pass and stores T x S.

    Returns:
        [B, H, T, D] in the dtype of the (autocast) inputs.

    Raises:
        ValueError: If a shape, dtype, device or option is invalid, or "triton" or "cpu" is requested and cannot run.
        NotImplementedError: For a derivative that the implementation does not support, or in `torch.jit.trace`.
        TypeError: If `attn_mask` is neither boolean nor floating, or an input is not a tensor.
    """
    if torch.jit.is_tracing() and not (pre is None and post is None):
        raise NotImplementedError("torch.jit.trace and the TorchScript-based ONNX exporter " + NO_TORCHSCRIPT)
    check_impl(impl)
    for name, x in (("q", q), ("k", k), ("v", v), ("attn_mask", attn_mask)):
        if not isinstance(x, Tensor) and (x is not None or name != "attn_mask"):
            raise TypeError(f"{name} is {type(x).__name__}; expected a tensor.")
    for name, weights in (("pre", pre), ("post", post)):
        _check_types(name, weights)
    dtype = autocast_dtype(q.device.type)
    if dtype is not None:
        q, k, v, pre, post, attn_mask = _cast(dtype, q, k, v, pre, post, attn_mask)
    _check_qkv(q, k, v)
    _check_documents(document_ids, q, k)
    _check_options(q, is_causal, window_size, scale, dropout_p, num_groups)
    _check_weights("pre", pre, q, k, num_groups)
    _check_weights("post", post, q, k, num_groups)
    visible, bias = split_mask(attn_mask, q, k)
    options = {"dropout_p": dropout_p, "num_groups": num_groups, "ranks": ranks_of(pre, post)}
    options["is_composed"] = pre is not None or post is not None
    choice = resolve_impl(impl, q, **options)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    ranges = None if document_ids is None else document_bounds(document_ids)
    numbers = map(plain_number, (window_size, scale, dropout_p, num_groups))
    call = AttentionCall(q, k, v, pre, post, visible, bias, ranges, is_causal, *numbers)
    if choice.impl == "triton":
        from .impl.triton import check_kernels

        check_kernels(call)
        choice = resolve_impl(impl, q, **options)  # the self-check may have rejected the kernels
    with nullcontext() if dtype is None else torch.autocast(q.device.type, enabled=False):
        match choice.impl:
            case "sdpa":
                return _plain_attention(call)
            case "reference":
                from .impl import reference as implementation
            case "compiled":
                from .impl import compiled as implementation
            case "cpu":
                from .impl import cpu as implementation
            case "triton":
                from .impl import triton as implementation
        return implementation.attention(call)


def _plain_attention(call: AttentionCall) -> Tensor:
    """Call PyTorch's SDPA with one equivalent mask; rows without visible keys are set to zero."""
    q, k, v, _, _, visible, bias, document_ids, is_causal, window_size, scale, dropout_p, _ = call
    T, S = q.shape[-2], k.shape[-2]
    options = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": bool(q.shape[1] != k.shape[1])}
    if document_ids is not None:
        visible = both_visible(visible, mask_of_documents(document_ids, T))
    if visible is None and bias is None and window_size is None and (not is_causal or T == S):
        return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, **options)
    block = visible_keys(T, S, is_causal=is_causal, window_size=window_size, device=q.device, query_offset=S - T)
    mask, empty = both_visible(block, visible), None
    if mask is not None and (visible is not None or T > S):
        empty = ~mask.any(-1, keepdim=True)
        mask = mask | empty
    if bias is not None:
        mask = bias if mask is None else torch.where(mask, bias, -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options)
    return out if empty is None else out.masked_fill(empty, 0.0)


@torch.compiler.assume_constant_result
def _has_autocast(device_type: str) -> bool:
    """Whether a device type supports autocast; the compiler of torch 2.10 cannot trace this query."""
    return torch.amp.is_autocast_available(device_type)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the autocast dtype of a device type; None if autocast is disabled."""
    if not _has_autocast(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def _cast(dtype: torch.dtype, q, k, v, pre, post, attn_mask):
    """Cast floating inputs to the autocast dtype, as PyTorch does for SDPA."""

    def cast(x: Tensor | None) -> Tensor | None:
        return x.to(dtype) if x is not None and x.is_floating_point() and x.dtype != torch.float64 else x

    pre, post = (w if w is None else w.map(cast) for w in (pre, post))
    return cast(q), cast(k), cast(v), pre, post, cast(attn_mask)


def split_mask(attn_mask: Tensor | None, q: Tensor, k: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Split a checked mask into a boolean visibility (False also for -inf) and a finite bias."""
    if attn_mask is None:
        return None, None
    check_mask(attn_mask, (*q.shape[:3], k.shape[2]), q.device)
    if not (torch.compiler.is_compiling() or attn_mask.requires_grad):
        attn_mask = _unexpanded(attn_mask)
    while attn_mask.dim() < 2:
        attn_mask = attn_mask.unsqueeze(0)
    if attn_mask.dtype == torch.bool:
        return attn_mask, None
    attn_mask = attn_mask.to(q.dtype)  # before the split: a value beyond the dtype's range becomes -inf
    visible = attn_mask != -torch.inf
    return visible, attn_mask.masked_fill(~visible, 0.0)


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


def _unexpanded(x: Tensor) -> Tensor:
    """Keep one slice along each expanded axis, so that a copy of a mask is not larger than the mask itself."""
    for axis, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x = x.narrow(axis, 0, 1)
    return x


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
    if window_size is not None and (not is_integer(window_size) or not 1 <= window_size < MAX_WINDOW):
        raise ValueError(
            f"window_size={window_size!r} must be an integer, at least 1 (the query's own position), or None."
        )
    if not isinstance(dropout_p, Real) or not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p!r} must be in [0, 1).")
    if scale is not None and not isinstance(scale, torch.SymFloat):
        is_number = isinstance(scale, Real) and not isinstance(scale, bool)
        if not is_number or not -MAX_SCALE < scale < MAX_SCALE:
            raise ValueError(f"scale={scale!r} must be a finite number, or None.")
    if not is_integer(num_groups) or num_groups < 1 or q.shape[1] % num_groups:
        raise ValueError(f"num_groups={num_groups} must be a positive divisor of the {q.shape[1]} heads of q.")


def _check_types(name: str, weights: ComposeWeights | None) -> None:
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
