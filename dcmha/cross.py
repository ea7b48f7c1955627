"""DCCrossAttention: cross-attention with composed heads."""

# B batch, T query tokens, S context tokens, H heads, D head dim, C width of queries

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .checks import check_booleans, check_factory, check_integers, check_numbers
from .dispatch import Impl
from .impl.checks import check_mask
from .impl.masking import combine_masks
from .layer import ComposedAttentionBase
from .options import COMPOSE_OPTIONS, ComposeOptions, check_names, compose_options_of
from .weights import ComposeProjection, ComposeWeights

Weights = tuple[ComposeWeights | None, ComposeWeights | None]  # pre- and post-composition


class ContextKV(NamedTuple):
    """Keys, values and key-side compose weights of a context, computed once for any number of calls.

    Attributes:
        k: Keys [B, H, S, D].
        v: Values, same shape.
        weights: Key side of the pre- and post-composition; None for a composition without one.
        mask: Boolean [B, 1, 1, S], True for real tokens; None if there is no padding.
        num_groups: Head groups of the layer.
    """

    k: Tensor
    v: Tensor
    weights: Weights
    mask: Tensor | None
    num_groups: int

    def rows(self, rows: Tensor) -> "ContextKV":
        """Select sequences of the batch; indices may repeat.

        Args:
            rows: Indices of the sequences, int64.
        """
        k, v, mask = (x if x is None else x.index_select(0, rows) for x in (self.k, self.v, self.mask))
        pre, post = (w if w is None else w.map(lambda x: x.index_select(0, rows)) for w in self.weights)
        return ContextKV(k, v, (pre, post), mask, self.num_groups)


class DCCrossAttention(ComposedAttentionBase):
    """Cross-attention with dynamically composed heads.

    The query side of the compose weights is computed from the queries' tokens, the key side from the context. With
    `pre_compose=False, post_compose=False` the layer computes ordinary cross-attention.

    Args:
        dim: Width C of the queries.
        num_heads: Heads H.
        context_dim: Width of the context; C if None.
        attn_head_dim: Head dim D; C / H if None.
        dim_out: Width of the output; C if None.
        qkv_bias: Bias on the q, k, v projections.
        qk_norm: Normalize q and k per head with `norm_layer`.
        proj_bias: Bias on the output projection.
        attn_drop: Dropout on the composed weights.
        proj_drop: Dropout on the output.
        norm_layer: Constructor for `qk_norm`.
        device: Where the parameters live.
        dtype: Dtype of the parameters.
        impl: As in `composed_attention`.
        **options: Fields of `ComposeOptions`.

    Raises:
        ValueError: If widths, heads or groups do not divide, a norm is requested without `norm_layer`, an option is
            unknown or out of range, or a composition is enabled that has no branch.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        context_dim: int | None = None,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        proj_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        impl: Impl = "auto",
        **options,
    ) -> None:
        super().__init__()
        check_names(options, COMPOSE_OPTIONS)
        self._set_options(impl=impl, **options)
        check_integers(dim=dim, num_heads=num_heads)
        check_integers(may_be_none=True, context_dim=context_dim, attn_head_dim=attn_head_dim, dim_out=dim_out)
        check_booleans(qkv_bias=qkv_bias, qk_norm=qk_norm, proj_bias=proj_bias)
        check_numbers(low=0, high=1, attn_drop=attn_drop, proj_drop=proj_drop)
        check_factory(device, dtype, norm_layer)
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"dim={dim} must be divisible by num_heads={num_heads} unless attn_head_dim is given.")
        if qk_norm and norm_layer is None:
            raise ValueError("norm_layer=None; qk_norm needs a norm layer, such as torch.nn.LayerNorm.")
        dd = {"device": device, "dtype": dtype}
        context_dim = context_dim or dim
        self.dim, self.context_dim, self.num_heads = dim, context_dim, num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        self.scale = self.head_dim**-0.5
        attn_dim = num_heads * self.head_dim
        self.q = nn.Linear(dim, attn_dim, bias=qkv_bias, **dd)
        self.kv = nn.Linear(context_dim, 2 * attn_dim, bias=qkv_bias, **dd)
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        sided = {**compose_options_of(self.options), **dd}
        self.compose = (
            CrossComposeProjection(dim, context_dim, num_heads, **sided) if self.options.is_composed else None
        )
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(attn_dim, dim_out or dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        context: Tensor | ContextKV,
        context_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from `x` to `context`.

        Args:
            x: Tokens of the queries [B, T, C].
            context: Tokens of the context [B, S, context_dim], or the result of `precompute_kv`.
            context_mask: Boolean [B, S], True = a real token, False = padding; None if all are real, or if `context` is
                a `ContextKV`.
            attn_mask: As in `composed_attention`, broadcastable to [B, H, T, S]; combined by AND.

        Returns:
            [B, T, dim_out]. For a row whose context is all padding, the projection of zeros.

        Raises:
            ValueError: If a shape does not fit, `context_mask` is not boolean, or is given with a `ContextKV`.
        """
        if isinstance(context, ContextKV):
            if context_mask is not None:
                raise ValueError(
                    "context_mask cannot be combined with a precomputed context, which has its own; expected None."
                )
            self._check_context_kv(context)
            self._check_tokens("x", x, self.dim, len(context.k))
            return self._run(self._attend_to, x, context, attn_mask)
        self._check(x, context, context_mask)
        return self._run(self._precompute_and_attend, x, context, context_mask, attn_mask)

    def precompute_kv(self, context: Tensor, context_mask: Tensor | None = None) -> ContextKV:
        """Compute keys, values and key-side compose weights of a context, to attend to it several times.

        Args:
            context: Tokens [B, S, context_dim].
            context_mask: As in `forward`.

        Raises:
            ValueError: As `forward`.
        """
        self._check(None, context, context_mask)
        return self._precompute_kv(context, context_mask)

    def _precompute_kv(self, context: Tensor, context_mask: Tensor | None) -> ContextKV:
        k, v = (self._heads(part) for part in self.kv(context).chunk(2, -1))
        weights = (None, None) if self.compose is None else self.compose.of_context(context)
        mask = None if context_mask is None else context_mask[:, None, None]
        return ContextKV(self.k_norm(k), v, weights, mask, self.num_groups)

    def _precompute_and_attend(
        self, x: Tensor, context: Tensor, context_mask: Tensor | None, attn_mask: Tensor | None
    ) -> Tensor:
        return self._attend_to(x, self._precompute_kv(context, context_mask), attn_mask)

    def _attend_to(self, x: Tensor, context_kv: ContextKV, attn_mask: Tensor | None) -> Tensor:
        q = self.q_norm(self._heads(self.q(x)))
        if context_kv.mask is not None:
            check_mask(attn_mask, (*q.shape[:3], context_kv.k.shape[2]), q.device)
            attn_mask = combine_masks(attn_mask, context_kv.mask)
        pre, post = (None, None) if self.compose is None else self.compose(x, context_kv.weights)
        out = self.attend(q, context_kv.k, context_kv.v, pre, post, attn_mask, window_size=self.window)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H D] to [B, H, T, D]."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _check_context_kv(self, context_kv: ContextKV) -> None:
        """Raise ValueError if `seen` was computed by a layer of different sizes or composition."""
        heads, given = (self.num_heads, self.head_dim), (context_kv.k.shape[1], context_kv.k.shape[3])
        key = None if self.compose is None else self.compose.key
        expected = [(None, None)] * 2
        if key is not None:
            branches = (key.options.rank or None, key.options.dynamic_gate)
            expected = [branches if one in key.options.compositions else (None, None) for one in ("pre", "post")]
        found = [
            (None, None) if w is None else (None if w.key.down is None else w.key.down.shape[2], w.key.gate is not None)
            for w in context_kv.weights
        ]
        if given != heads or found != expected or context_kv.num_groups != self.num_groups:
            raise ValueError(
                f"context was precomputed by another layer: heads {given} in {context_kv.num_groups} groups, (rank, "
                f"gate) {found}; expected a result of this layer's `precompute_kv`: heads {heads} in {self.num_groups} "
                f"groups, {expected}."
            )

    def _check_tokens(self, name: str, tokens: Tensor, width: int, rows: int | None) -> None:
        if not isinstance(tokens, Tensor):
            raise ValueError(f"{name} is {type(tokens).__name__}; expected a tensor [B, tokens, {width}].")
        if tokens.dim() != 3 or tokens.shape[-1] != width or rows not in (None, tokens.shape[0]):
            accepted = f"[{'B' if rows is None else rows}, tokens, {width}]"
            raise ValueError(f"{name} has shape {list(tokens.shape)}; expected {accepted}.")

    def _check(self, x: Tensor | None, context: Tensor, context_mask: Tensor | None) -> None:
        if x is not None:
            self._check_tokens("x", x, self.dim, len(x) if x.dim() == 3 else None)
        self._check_tokens("context", context, self.context_dim, None if x is None else len(x))
        if context_mask is None:
            return
        if not isinstance(context_mask, Tensor):
            raise ValueError(f"context_mask: expected a boolean tensor [B, S], not {type(context_mask).__name__}.")
        if context_mask.dtype != torch.bool or context_mask.shape != context.shape[:2]:
            raise ValueError(
                f"context_mask has shape {list(context_mask.shape)} and dtype {context_mask.dtype}; expected "
                f"{list(context.shape[:2])}, torch.bool (True = a real token)."
            )


class CrossComposeProjection(nn.Module):
    """Compose weights from two sequences: one `ComposeProjection` for each enabled side.

    Args:
        dim: Width of the queries' tokens.
        context_dim: Width of the keys' tokens.
        num_heads: Heads H.
        device: Where the parameters live.
        dtype: Dtype of the parameters.
        **options: Fields of `ComposeOptions`.

    Raises:
        ValueError: If nothing is left to compose, or an option is invalid.
    """

    def __init__(
        self,
        dim: int,
        context_dim: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options,
    ) -> None:
        super().__init__()
        dd = {"device": device, "dtype": dtype}
        chosen = ComposeOptions(**options)
        chosen.check_composes()
        has_query, has_key = "query" in chosen.sides or chosen.static_base, "key" in chosen.sides
        only_query = {**options, "key_wise": False}
        only_key = {**options, "query_wise": False, "static_base": False}
        self.query = ComposeProjection(dim, num_heads, **only_query, **dd) if has_query else None
        self.key = ComposeProjection(context_dim, num_heads, **only_key, **dd) if has_key else None

    def forward(self, x: Tensor, context: Tensor | Weights) -> Weights:
        """Compute the weights of both compositions from queries [B, T, C] and a context [B, S, context_dim], or the
        result of `of_context`.
        """
        keys = self.of_context(context) if isinstance(context, Tensor) else context
        if self.key is None:
            return self.query(x)
        if self.query is None:
            return keys
        pre, post = (
            query if query is None else query._replace(key=key.key)
            for query, key in zip(self.query(x), keys, strict=True)
        )
        return pre, post

    def of_context(self, context: Tensor) -> Weights:
        """Compute the key side of both compositions from the context [B, S, context_dim]."""
        return (None, None) if self.key is None else self.key(context)
