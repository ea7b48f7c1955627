"""DCAttention: a drop-in for timm's `Attention` whose heads are composed (paper, equations 4 to 7)."""

# B batch, T query tokens, S key tokens, H heads, D head dim, C model width, R compose rank, G head groups

import logging
from collections.abc import Callable
from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn

from .choice import Impl, ResolvedImpl, check_impl, resolve_impl
from .functional import composed_attention
from .impl.masking import combine_masks
from .weights import ComposeProjection, ComposeWeights, TokenWeights

logger = logging.getLogger(__name__)

Rope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
KeyWeights = list[TokenWeights] | None


class AttentionCache(Protocol):
    """What the layer asks of a decoding cache."""

    def update(self, k: Tensor, v: Tensor, key_weights: KeyWeights) -> tuple[Tensor, Tensor, KeyWeights, Tensor | None]:
        """Add new keys, values [B, H, T, D] and their compose weights; return all kept ones and a mask, or None."""


class DCAttention(nn.Module):
    """Self-attention with dynamically composed heads.

    The first block of arguments is that of timm's `Attention`; state-dict keys of the parts they share are the same,
    and everything this layer adds lies under `compose.`. With `pre_compose=False, post_compose=False` it is plain
    attention.

    The keyword options can also be set as class attributes, for places that take a class and construct it themselves
    (None takes the class's):

        timm.create_model("vit_small_patch16_224", attn_layer=DCAttention.with_options(rank=1))

    Args:
        dim: Width C of the input.
        num_heads: Heads H.
        attn_head_dim: Head dim D; C / H if None.
        dim_out: Width of the output; C if None.
        qkv_bias: Bias on the q, k, v projections (and on the output gate).
        qk_norm: Normalise q and k per head with `norm_layer`.
        scale_norm: Normalise the concatenated heads with `norm_layer` before the output projection.
        proj_bias: Bias on the output projection.
        gated: Multiply the concatenated heads by a sigmoid gate of the input (timm's; not the compose gate).
        attn_drop: Dropout on the composed weights.
        proj_drop: Dropout on the output.
        norm_layer: Constructor for `qk_norm` and `scale_norm`.
        device: Where the parameters live.
        dtype: Their dtype.
        rank: Rank R of the dynamic projections, 2 in the paper; 0 leaves them out.
        pre_compose: Compose the scores before the softmax.
        post_compose: Compose the weights after it.
        query_wise: Compose by weights from the query's token.
        key_wise: Compose by weights from the key's token.
        dynamic_gate: Gate each head by the token.
        static_base: Add a learned static base (talking heads).
        num_groups: Compose within G groups of heads (section 3.2).
        window: A query sees this many keys, its own included; None for all.
        impl: As in `composed_attention`.

    Raises:
        ValueError: If widths, heads or groups do not divide, a norm is asked for without `norm_layer`, or an option is
            out of range.
    """

    rank: int = 2
    pre_compose: bool = True
    post_compose: bool = True
    query_wise: bool = True
    key_wise: bool = True
    dynamic_gate: bool = True
    static_base: bool = False
    num_groups: int = 1
    window: int | None = None
    impl: Impl = "auto"

    OPTIONS = (
        *("rank", "pre_compose", "post_compose", "query_wise", "key_wise"),
        *("dynamic_gate", "static_base", "num_groups", "window", "impl"),
    )

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        attn_head_dim: int | None = None,
        dim_out: int | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        scale_norm: bool = False,
        proj_bias: bool = True,
        gated: bool = False,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        norm_layer: Callable[..., nn.Module] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        rank: int | None = None,
        pre_compose: bool | None = None,
        post_compose: bool | None = None,
        query_wise: bool | None = None,
        key_wise: bool | None = None,
        dynamic_gate: bool | None = None,
        static_base: bool | None = None,
        num_groups: int | None = None,
        window: int | None = None,
        impl: Impl | None = None,
    ) -> None:
        super().__init__()
        given = locals()
        self._set_options({name: given[name] for name in self.OPTIONS})
        if dim < 1 or num_heads < 1 or (attn_head_dim is None and dim % num_heads):
            raise ValueError(f"dim={dim} must be divisible by num_heads={num_heads}, or attn_head_dim be given.")
        if attn_head_dim is not None and attn_head_dim < 1:
            raise ValueError(f"attn_head_dim={attn_head_dim} must be at least 1, or None.")
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("norm_layer=None; qk_norm and scale_norm need a norm layer, such as torch.nn.LayerNorm.")
        dd = {"device": device, "dtype": dtype}
        self.dim, self.num_heads = dim, num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        self.attn_dim = num_heads * self.head_dim
        self.scale = self.head_dim**-0.5
        self.resolved_impl: ResolvedImpl | None = None

        self.qkv = nn.Linear(dim, self.attn_dim * 3, bias=qkv_bias, **dd)
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.compose = self._make_projection(dim, dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(self.attn_dim, **dd) if scale_norm else nn.Identity()
        self.gate = nn.Linear(dim, self.attn_dim, bias=qkv_bias, **dd) if gated else None
        self.proj = nn.Linear(self.attn_dim, dim_out or dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def _set_options(self, options: dict) -> None:
        """Set the options that are not None; the others stay as the class has them."""
        for name, value in options.items():
            if value is not None:
                setattr(self, name, value)
        if self.window is not None and self.window < 1:
            raise ValueError(f"window={self.window} must be at least 1 (the query's own position), or None.")
        check_impl(self.impl)

    def _make_projection(self, dim: int, dd: dict) -> ComposeProjection | None:
        if not (self.pre_compose or self.post_compose):
            return None
        layer_options = ("window", "impl")
        options = {name: getattr(self, name) for name in self.OPTIONS if name not in layer_options}
        return ComposeProjection(dim, self.num_heads, **options, **dd)

    @classmethod
    def with_options(cls, **options) -> type["DCAttention"]:
        """Make a subclass with other defaults, for code that takes an attention class.

        Raises:
            ValueError: If an option is not one of `DCAttention.OPTIONS`.
        """
        unknown = sorted(set(options) - set(cls.OPTIONS))
        if unknown:
            raise ValueError(f"unknown options {unknown}; accepted: {', '.join(cls.OPTIONS)}.")
        base, given = cls.__dict__.get("_made_from", (cls, {}))
        options = given | options
        return type(base.__name__, (base,), {"__module__": base.__module__, "_made_from": (base, options), **options})

    def __reduce_ex__(self, protocol):
        """Pickle a layer of a class made by `with_options`, which no module holds, by its base and options."""
        if "_made_from" in type(self).__dict__:
            return _new_with_options, type(self)._made_from, self.__dict__
        return super().__reduce_ex__(protocol)

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Rope | None = None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        """Attend within `x`.

        Args:
            x: Tokens [B, T, C].
            attn_mask: As in `composed_attention`, broadcastable to [B, H, T, S].
            is_causal: As in `composed_attention`.
            rope: Rotates q and k, each [B, H, T, D], before the scores.
            cache: Keeps keys, values and key-side compose weights between calls.

        Returns:
            [B, T, dim_out].

        Raises:
            ValueError: If `x` or `attn_mask` has a shape that does not fit.
        """
        B, T, _ = self._check_input(x)
        q, k, v = self._project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rope(q, k)
        query_weights, key_weights = self._token_weights(x)
        if cache is not None:
            k, v, key_weights, cache_mask = cache.update(k, v, key_weights)
            attn_mask = combine_masks(attn_mask, cache_mask)
        pre, post = (None, None) if self.compose is None else self.compose.join(query_weights, key_weights)
        out = self._attend(q, k, v, pre, post, attn_mask, is_causal)
        out = self.norm(out.transpose(1, 2).reshape(B, T, self.attn_dim))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        pre: ComposeWeights | None,
        post: ComposeWeights | None,
        attn_mask: Tensor | None,
        is_causal: bool,
    ) -> Tensor:
        """Call the operator with this layer's options: [B, H, T, D]."""
        dropout_p = self.attn_drop.p if self.training else 0.0
        out = composed_attention(
            q,
            k,
            v,
            pre,
            post,
            attn_mask=attn_mask,
            is_causal=is_causal,
            window=self.window,
            scale=self.scale,
            dropout_p=dropout_p,
            num_groups=self.num_groups,
            impl=self.impl,
        )
        self._record_impl(q, attn_mask, dropout_p)
        return out

    def _check_input(self, x: Tensor) -> torch.Size:
        if x.dim() != 3 or x.shape[-1] != self.dim:
            raise ValueError(f"x has shape {list(x.shape)}; accepted: [B, T, C] with C = {self.dim}.")
        return x.shape

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make q, k and v, each [B, H, T, D]."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
        return qkv.permute(2, 0, 3, 1, 4).unbind(0)

    def _token_weights(self, x: Tensor) -> tuple[KeyWeights, KeyWeights]:
        """Make the query and the key side from the same tokens in one pass."""
        if self.compose is None:
            return None, None
        sides = self.compose.token_weights(x)
        return (sides[0] if self.query_wise else None), (sides[-1] if self.key_wise else None)

    def _record_impl(self, q: Tensor, attn_mask: Tensor | None, dropout_p: float) -> None:
        """Remember which implementation ran first, and log it once for all layers alike."""
        if torch.compiler.is_compiling() or self.resolved_impl is not None:
            return
        options = {"attn_mask": attn_mask, "dropout_p": dropout_p, "num_groups": self.num_groups}
        choice = resolve_impl(self.impl, q, is_composed=self.compose is not None, **options)
        self.resolved_impl = choice.impl
        _log_choice(self.impl, *choice)


@cache
def _log_choice(impl: Impl, resolved: ResolvedImpl, reason: str | None) -> None:
    because = "" if reason is None else f": {reason}"
    logger.info("DCAttention(impl=%r) runs as %r%s.", impl, resolved, because)


def _new_with_options(base: type[DCAttention], options: dict) -> DCAttention:
    """Make an empty instance, for unpickling."""
    cls = base.with_options(**options)
    return cls.__new__(cls)
