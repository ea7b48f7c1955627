"""DCAttention: a drop-in for timm's `Attention` whose heads are composed (paper, equations 4 to 7)."""

# B batch, T query tokens, S key tokens, H heads, D head dim, C model width, R compose rank, G head groups

from collections.abc import Callable, Mapping
from functools import cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from .cache import CacheView
from .checks import check_booleans, check_factory, check_integers, check_numbers
from .impl.masking import DocumentBounds
from .layer import LAYER_OPTIONS, ComposedAttentionBase, check_kv_heads, check_options
from .options import compose_options_of
from .weights import ComposeProjection, ComposeWeights

Rope = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class AttentionCache(Protocol):
    """Interface of a decoding cache, as the layer uses it."""

    def update(self, k: Tensor, v: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None) -> CacheView:
        """Add the keys and values [B, num_kv_heads, T, D] of new tokens and the key side of their compose weights."""


class DCAttention(ComposedAttentionBase):
    """Self-attention with dynamically composed heads.

    The arguments up to `dtype` are those of timm's `Attention`. State-dict keys shared with timm are unchanged; the
    parameters of the composition are under `compose.`. With `pre_compose=False, post_compose=False` the layer computes
    ordinary multi-head attention. For APIs that take an attention class and construct it:

        timm.create_model("vit_small_patch16_224", attn_layer=DCAttention.with_options(rank=1))

    Args:
        dim: Width C of the input.
        num_heads: Heads H.
        attn_head_dim: Head dim D; C / H if None.
        dim_out: Width of the output; C if None.
        qkv_bias: Bias on the q, k, v projections (and on the output gate).
        qk_norm: Normalize q and k per head with `norm_layer`.
        scale_norm: Normalize the concatenated heads with `norm_layer` before the output projection.
        proj_bias: Bias on the output projection.
        gated: Multiply the concatenated heads by a sigmoid gate of the input (timm's; not the compose gate).
        attn_drop: Dropout on the composed weights.
        proj_drop: Dropout on the output.
        norm_layer: Constructor for `qk_norm` and `scale_norm`.
        device: Where the parameters live.
        dtype: Dtype of the parameters.
        num_kv_heads: Heads of the keys and values, each shared by H / num_kv_heads neighboring heads of the queries
            (grouped-query attention); H if None. Composition mixes the heads of the queries.
        **options: Fields of `ComposeOptions` (`rank`, `num_groups`, ...); `window_size` and `impl`, as in
            `composed_attention`.

    Attributes:
        OPTIONS: Names of these options.
        defaults: Options whose defaults a subclass changes.

    Raises:
        ValueError: If widths, heads or groups do not divide, a norm is requested without `norm_layer`, or an option is
            unknown or out of range.
    """

    OPTIONS: ClassVar[tuple[str, ...]] = LAYER_OPTIONS
    defaults: ClassVar[Mapping[str, object]] = {}

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
        num_kv_heads: int | None = None,
        **options,
    ) -> None:
        super().__init__()
        self._set_options(**{**self.defaults, **options})
        check_integers(dim=dim, num_heads=num_heads)
        check_integers(may_be_none=True, attn_head_dim=attn_head_dim, dim_out=dim_out, num_kv_heads=num_kv_heads)
        check_booleans(qkv_bias=qkv_bias, qk_norm=qk_norm, scale_norm=scale_norm, proj_bias=proj_bias, gated=gated)
        check_numbers(low=0, high=1, attn_drop=attn_drop, proj_drop=proj_drop)
        check_factory(device, dtype, norm_layer)
        if attn_head_dim is None and dim % num_heads:
            raise ValueError(f"dim={dim} must be divisible by num_heads={num_heads} unless attn_head_dim is given.")
        check_kv_heads(num_heads, num_kv_heads)
        if (qk_norm or scale_norm) and norm_layer is None:
            raise ValueError("norm_layer=None; qk_norm and scale_norm need a norm layer, such as torch.nn.LayerNorm.")
        dd = {"device": device, "dtype": dtype}
        self.dim, self.num_heads, self.num_kv_heads = dim, num_heads, num_kv_heads or num_heads
        self.head_dim = attn_head_dim or dim // num_heads
        self.attn_dim = num_heads * self.head_dim
        self.scale = self.head_dim**-0.5

        self.qkv = nn.Linear(dim, sum(self._qkv_heads) * self.head_dim, bias=qkv_bias, **dd)
        self.q_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.k_norm = norm_layer(self.head_dim, **dd) if qk_norm else nn.Identity()
        self.compose = self._make_projection(dim, dd)
        self.attn_drop = nn.Dropout(attn_drop)
        self.norm = norm_layer(self.attn_dim, **dd) if scale_norm else nn.Identity()
        self.gate = nn.Linear(dim, self.attn_dim, bias=qkv_bias, **dd) if gated else None
        self.proj = nn.Linear(self.attn_dim, dim_out or dim, bias=proj_bias, **dd)
        self.proj_drop = nn.Dropout(proj_drop)

    def _make_projection(self, dim: int, dd: dict) -> ComposeProjection | None:
        if not self.options.is_composed:
            return None
        return ComposeProjection(dim, self.num_heads, **compose_options_of(self.options), **dd)

    @classmethod
    def with_options(cls, **options) -> type["DCAttention"]:
        """Create a subclass with different defaults, for code that takes an attention class. Its instances can be
        pickled.

        Raises:
            ValueError: If an option is not one of `DCAttention.OPTIONS`, or out of range.
        """
        check_options(**{**cls.defaults, **options})
        return _configured(vars(cls).get("configured_from", cls), tuple(sorted({**cls.defaults, **options}.items())))

    def __init_subclass__(cls, **kwargs) -> None:
        """Raise TypeError if a subclass sets options as class attributes, which would have no effect."""
        super().__init_subclass__(**kwargs)
        misplaced = sorted(set(cls.OPTIONS) & set(vars(cls)))
        if misplaced:
            raise TypeError(f"{cls.__name__} sets {misplaced} as class attributes; set defaults = {{...}} instead.")

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        rope: Rope | None = None,
        cache: AttentionCache | None = None,
        document_ids: Tensor | DocumentBounds | None = None,
    ) -> Tensor:
        """Compute self-attention over `x`.

        Args:
            x: Tokens [B, T, C].
            attn_mask: As in `composed_attention`, broadcastable to [B, H, T, S]. Cannot be combined with a cache.
            is_causal: As in `composed_attention`.
            rope: Rotates q and k, each [B, heads, T, D], before the scores.
            cache: Stores keys, values and key-side compose weights between calls. Requires `is_causal=True`.
            document_ids: As in `composed_attention`. Cannot be combined with a cache.

        Returns:
            [B, T, dim_out].

        Raises:
            ValueError: If a shape does not match, or a cache is combined with document ids or a mask, is used without
                `is_causal=True`, or was created for another window size.
        """
        self._check_input(x)
        if cache is None:
            return self._run(self._forward, x, attn_mask, is_causal, rope, document_ids)
        _check_cached_call(attn_mask, is_causal, document_ids)
        return self._forward(x, attn_mask, is_causal, rope, document_ids, cache)

    def _forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        rope: Rope | None,
        document_ids: Tensor | DocumentBounds | None,
        cache: AttentionCache | None = None,
    ) -> Tensor:
        q, k, v = self._project(x)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rope(q, k)
        pre, post = (None, None) if self.compose is None else self.compose(x)
        window_size = self.window
        if cache is not None:
            k, v, pre, post, attn_mask, is_causal, window_size = self._update_cache(cache, k, v, pre, post)
        out = self.attend(q, k, v, pre, post, attn_mask, document_ids, is_causal=is_causal, window_size=window_size)
        out = self.norm(out.transpose(1, 2).flatten(2))
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _update_cache(
        self, cache: AttentionCache, k: Tensor, v: Tensor, pre: ComposeWeights | None, post: ComposeWeights | None
    ) -> CacheView:
        """Add new tokens to a cache. In the result, `is_ordered` and `window_size` are those of the operator's call."""
        view = cache.update(k, v, pre, post)
        if view.window_size != self.window:
            raise ValueError(f"the cache is for window_size={view.window_size}; got a layer with {self.window}.")
        return view if view.is_ordered else view._replace(window_size=None)

    def _check_input(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != self.dim:
            got = f"shape {list(x.shape)}" if isinstance(x, Tensor) else f"type {type(x).__name__}"
            raise ValueError(f"x has {got}; expected a tensor [B, T, C] with C = {self.dim}.")

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to q [B, H, T, D], k and v [B, num_kv_heads, T, D]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return heads.split(self._qkv_heads, 1)

    @property
    def _qkv_heads(self) -> list[int]:
        """Heads of q, k and v, in the order of the rows of `qkv`."""
        return [self.num_heads, self.num_kv_heads, self.num_kv_heads]


def _check_cached_call(attn_mask: Tensor | None, is_causal: bool, document_ids: Tensor | DocumentBounds | None) -> None:
    """Raise ValueError if the arguments of a call cannot be combined with a cache."""
    for name, value in (("document_ids", document_ids), ("attn_mask", attn_mask)):
        if value is not None:
            raise ValueError(f"{name} and cache cannot be combined; expected one of the two.")
    if not is_causal:
        raise ValueError("is_causal=False: expected True when a cache is given.")


@cache
def _configured(base: type[DCAttention], options: tuple[tuple[str, object], ...]) -> type[DCAttention]:
    """Create a subclass of `base` with these defaults."""

    class Configured(base):
        defaults = dict(options)
        configured_from = base

        def __reduce_ex__(self, protocol):
            if type(self) is not Configured:
                return super().__reduce_ex__(protocol)
            return _new_configured, (base, options), self.__getstate__()

    Configured.__name__, Configured.__qualname__ = base.__name__, base.__qualname__
    return Configured


def _new_configured(base: type[DCAttention], options: tuple[tuple[str, object], ...]) -> DCAttention:
    """Create an empty instance of a class made by `with_options`, for unpickling."""
    configured = _configured(base, options)
    return configured.__new__(configured)
