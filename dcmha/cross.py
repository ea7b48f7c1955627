"""DCCrossAttention: attention from one sequence to another whose heads are composed."""

# B batch, T query tokens, S context tokens, H heads, D head dim, C width of queries

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .choice import Impl, check_impl
from .functional import composed_attention
from .impl.masking import combine_masks
from .weights import ComposeProjection, ComposeWeights


class DCCrossAttention(nn.Module):
    """Cross-attention with dynamically composed heads: queries make the query side, the context makes the key side.

    Args:
        dim: Width C of the queries.
        num_heads: Heads H.
        context_dim: Width of the context; C if None.
        attn_head_dim: Head dim D; C / H if None.
        dim_out: Width of the output; C if None.
        qkv_bias: Bias on the q, k, v projections.
        qk_norm: Normalise q and k per head with `norm_layer`.
        proj_bias: Bias on the output projection.
        attn_drop: Dropout on the composed weights.
        proj_drop: Dropout on the output.
        norm_layer: Constructor for `qk_norm`.
        device: Where the parameters live.
        dtype: Their dtype.
        rank: Like those below, as in `DCAttention`.
        pre_compose: Compose the scores before the softmax.
        post_compose: Compose the weights after it.
        query_wise: Compose by weights from the query's token.
        key_wise: Compose by weights from the context's token.
        dynamic_gate: Gate each head by the token.
        static_base: Add a learned static base.
        num_groups: Compose within G groups of heads.
        impl: As in `composed_attention`.

    Raises:
        ValueError: If widths, heads or groups do not divide, a norm is asked for without `norm_layer`, or nothing is
            left to compose.
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
        rank: int = 2,
        pre_compose: bool = True,
        post_compose: bool = True,
        query_wise: bool = True,
        key_wise: bool = True,
        dynamic_gate: bool = True,
        static_base: bool = False,
        num_groups: int = 1,
        impl: Impl = "auto",
    ) -> None:
        super().__init__()
        if dim < 1 or num_heads < 1 or (attn_head_dim is None and dim % num_heads):
            raise ValueError(f"dim={dim} must be divisible by num_heads={num_heads}, or attn_head_dim be given.")
        for name, width in (("context_dim", context_dim), ("attn_head_dim", attn_head_dim), ("dim_out", dim_out)):
            if width is not None and width < 1:
                raise ValueError(f"{name}={width} must be at least 1, or None.")
        if qk_norm and norm_layer is None:
            raise ValueError("norm_layer=None; qk_norm needs a norm layer, such as torch.nn.LayerNorm.")
        check_impl(impl)
        dd = {"device": device, "dtype": dtype}
        context_dim = context_dim or dim
        self.dim, self.context_dim, self.num_heads, self.num_groups, self.impl = (
            dim,
            context_dim,
            num_heads,
            num_groups,
            impl,
        )
        self.head_dim = attn_head_dim or dim // num_heads
        self.scale = self.head_dim**-0.5
        attn_dim = num_heads * self.head_dim
        self.q = nn.Linear(dim, attn_dim, bias=qkv_bias, **dd)
        self.kv = nn.Linear(context_dim, 2 * attn_dim, bias=qkv_bias, **dd)
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.compose = SidedProjection(
            dim,
            context_dim,
            num_heads,
            query_wise=query_wise,
            key_wise=key_wise,
            static_base=static_base,
            rank=rank,
            pre_compose=pre_compose,
            post_compose=post_compose,
            dynamic_gate=dynamic_gate,
            num_groups=num_groups,
            **dd,
        )
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(attn_dim, dim_out or dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(
        self,
        x: Tensor,
        context: Tensor,
        context_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from `x` to `context`.

        Args:
            x: Tokens that ask [B, T, C].
            context: Tokens that are asked [B, S, context_dim].
            context_mask: Boolean [B, S], True = a real token, False = padding; None if all are real.
            attn_mask: As in `composed_attention`, broadcastable to [B, H, T, S]; combined by AND.

        Returns:
            [B, T, dim_out]; for an image whose context is all padding, what the projection makes of zeros.

        Raises:
            ValueError: If a shape does not fit, or `context_mask` is not boolean.
        """
        self._check(x, context, context_mask)
        q = self.q_norm(self._heads(self.q(x)))
        k, v = (self._heads(part) for part in self.kv(context).chunk(2, -1))
        if context_mask is not None:
            attn_mask = combine_masks(attn_mask, context_mask[:, None, None])
        pre, post = self.compose(x, context)
        out = composed_attention(
            q,
            self.k_norm(k),
            v,
            pre,
            post,
            attn_mask=attn_mask,
            scale=self.scale,
            dropout_p=self.attn_drop.p if self.training else 0.0,
            num_groups=self.num_groups,
            impl=self.impl,
        )
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))

    def _heads(self, x: Tensor) -> Tensor:
        """[B, T, H D] to [B, H, T, D]."""
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _check(self, x: Tensor, context: Tensor, context_mask: Tensor | None) -> None:
        for name, tokens, width in (("x", x, self.dim), ("context", context, self.context_dim)):
            if tokens.dim() != 3 or tokens.shape[-1] != width or tokens.shape[0] != x.shape[0]:
                accepted = f"[{x.shape[0] if x.dim() == 3 else 'B'}, tokens, {width}]"
                raise ValueError(f"{name} has shape {list(tokens.shape)}; accepted: {accepted}.")
        if context_mask is None:
            return
        if context_mask.dtype != torch.bool or context_mask.shape != context.shape[:2]:
            raise ValueError(
                f"context_mask has shape {list(context_mask.shape)} and dtype {context_mask.dtype}; accepted: "
                f"{list(context.shape[:2])}, torch.bool (True = a real token)."
            )


class SidedProjection(nn.Module):
    """Compose weights from two sequences: one `ComposeProjection` for each side that is on.

    Args:
        dim: Width of the queries' tokens.
        context_dim: Width of the keys' tokens.
        num_heads: Heads H.
        query_wise: Make the query side.
        key_wise: Make the key side.
        static_base: Learn a static base.
        **options: As in `ComposeProjection`.

    Raises:
        ValueError: If nothing is left to compose, or an option does not fit.
    """

    def __init__(
        self,
        dim: int,
        context_dim: int,
        num_heads: int,
        *,
        query_wise: bool,
        key_wise: bool,
        static_base: bool,
        **options,
    ) -> None:
        super().__init__()
        sides = {"query_wise": query_wise, "key_wise": False, "static_base": static_base}
        needs_key = key_wise and not (options["rank"] == 0 and not options["dynamic_gate"])
        self.query = (
            ComposeProjection(dim, num_heads, **sides, **options)
            if query_wise or static_base or not needs_key
            else None
        )
        sides = {"query_wise": False, "key_wise": True, "static_base": False}
        self.key = ComposeProjection(context_dim, num_heads, **sides, **options) if needs_key else None

    def forward(self, x: Tensor, context: Tensor) -> tuple[ComposeWeights | None, ComposeWeights | None]:
        """Make the weights of both compositions from queries [B, T, C] and context [B, S, context_dim]."""
        query = self.query.token_weights(x) if self.query is not None else []
        key = self.key.token_weights(context) if self.key is not None else []
        owner = self.key if self.query is None else self.query
        return owner.join(query[0] if query else None, key[0] if key else None)
