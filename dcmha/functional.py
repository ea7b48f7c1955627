"""The public function for composed attention: checks arguments, selects the implementation, calls it."""

# B batch, T query tokens, S key tokens, H heads, D head dim, R compose rank, G head groups

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from .autocast import autocast_dtype, cast_inputs
from .checks import plain_number
from .dispatch import Impl, check_impl, resolve_impl
from .impl.call import AttentionCall, ranks_of
from .impl.checks import check_types, check_values
from .impl.masking import DocumentBounds, document_bounds, split_mask
from .weights import ComposeWeights

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
    check_types(q, k, v, attn_mask, pre, post)
    dtype = autocast_dtype(q.device.type)
    if dtype is not None:
        q, k, v, pre, post, attn_mask = cast_inputs(dtype, q, k, v, pre, post, attn_mask)
    options = (is_causal, window_size, scale, dropout_p, num_groups)
    check_values(q, k, v, pre, post, attn_mask, document_ids, *options)
    visible, bias = split_mask(attn_mask, q.dtype)
    documents = None if document_ids is None else document_bounds(document_ids)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    numbers = map(plain_number, (window_size, scale, dropout_p, num_groups))
    call = AttentionCall(q, k, v, pre, post, visible, bias, documents, is_causal, *numbers)
    attention = _select(impl, call)
    with nullcontext() if dtype is None else torch.autocast(q.device.type, enabled=False):
        return attention(call)


def _select(impl: Impl, call: AttentionCall) -> Callable[[AttentionCall], Tensor]:
    """Return the function of the implementation that runs a call."""
    options = {"dropout_p": call.dropout_p, "num_groups": call.num_groups, "ranks": ranks_of(call.pre, call.post)}
    options["is_composed"] = call.pre is not None or call.post is not None
    choice = resolve_impl(impl, call.q, **options)
    if choice.impl == "triton":
        from .impl.triton import check_kernels

        check_kernels(call)
        choice = resolve_impl(impl, call.q, **options)  # the self-check may have rejected the kernels
    match choice.impl:
        case "sdpa":
            from .impl import sdpa as implementation
        case "reference":
            from .impl import reference as implementation
        case "compiled":
            from .impl import compiled as implementation
        case "cpu":
            from .impl import cpu as implementation
        case "triton":
            from .impl import triton as implementation
    return implementation.attention
