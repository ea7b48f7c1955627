"""One composed layer for many attention classes of timm: a family defines queries, keys, values and output."""

# B batch, T query tokens, S key tokens, H heads, D head dim, C model width

from collections.abc import Callable
from functools import cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from dcmha import ComposedAttentionBase, ComposeProjection, ComposeWeights, compose_options_of
from dcmha.cross import CrossComposeProjection


class AttentionParts(NamedTuple):
    """Intermediate results of an attention module.

    Attributes:
        q: Queries [B, H, T, D].
        k: Keys [B, H, S, D].
        v: Values [B, H, S, D].
        queries: Tokens for the query side of the compose weights [B, T, C].
        keys: Tokens for the key side [B, S, C].
        finish: Computes the module's output from the attended values [B, H, T, D].
        bias: Added to the scores after their composition, broadcastable to [B, H, T, S]; None for none.
        pre: The module's own static mixing of the scores, minus the identity [H, H] (from, to); None for none.
        post: The module's own static mixing of the attention weights, likewise.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    queries: Tensor
    keys: Tensor
    finish: Callable[[Tensor], object]
    bias: Tensor | None = None
    pre: Tensor | None = None
    post: Tensor | None = None


class AttentionWidths(NamedTuple):
    """Width of the tokens for the query side, and of those for the key side if it differs."""

    queries: int
    keys: int | None = None


class Family(NamedTuple):
    """An attention class of timm.

    Attributes:
        parts: Computes the parts from the module and the arguments of its forward.
        widths: Returns the widths of a module.
        heads: Name of the attribute with the number of heads.
        scale: Returns the scale of the queries.
        mixes_heads: Whether the class has its own static mixing of all heads.
    """

    parts: Callable[..., AttentionParts]
    widths: Callable[[nn.Module], AttentionWidths]
    heads: str = "num_heads"
    scale: Callable[[nn.Module], float] = lambda module: float(module.scale)
    mixes_heads: bool = False


class ComposedParts(ComposedAttentionBase):
    """Composed attention of a family. Shares parameters, buffers, submodules and attributes with timm's module.

    Args:
        attention: The replaced module.
        **options: `impl` and fields of `ComposeOptions`.

    Raises:
        ValueError: If an option is unknown or out of range, or does not match the module.
    """

    family: ClassVar[Family]
    kind: ClassVar[type[nn.Module]]

    def __init__(self, attention: nn.Module, **options) -> None:
        nn.Module.__init__(self)
        share_parameters(self, attention)
        self._set_options(**options)
        if self.window is not None:
            raise ValueError(f"window_size={self.window}: {type(attention).__name__} has its own windows, or none.")
        if self.family.mixes_heads and self.options.num_groups > 1:
            raise ValueError(f"num_groups={self.options.num_groups}: {type(attention).__name__} mixes all heads.")
        self.num_heads = getattr(attention, self.family.heads)
        self.scale = self.family.scale(attention)
        if not hasattr(self, "attn_drop"):
            self.attn_drop = nn.Dropout(0.0)
        parameter, widths = next(attention.parameters()), self.family.widths(attention)
        made = compose_options_of(self.options) | {"device": parameter.device, "dtype": parameter.dtype}
        if widths.keys is None:
            self.compose = ComposeProjection(widths.queries, self.num_heads, **made)
        else:
            self.compose = CrossComposeProjection(widths.queries, widths.keys, self.num_heads, **made)

    def __reduce_ex__(self, protocol: int) -> tuple:
        """Pickle by timm's class, because the composed class may not exist yet in the reading process."""
        _, _, *state = super().__reduce_ex__(protocol)
        return (_empty, (self.kind,), *state)

    def forward(self, *args, **kwargs):
        """Compute timm's attention with composed heads; arguments and output as in timm."""
        parts = self.family.parts(self, *args, **kwargs)
        is_one = isinstance(self.compose, ComposeProjection)
        pre, post = self.compose(parts.queries) if is_one else self.compose(parts.queries, parts.keys)
        pre, post = _with_base(pre, parts.pre), _with_base(post, parts.post)
        return parts.finish(self.attend(parts.q, parts.k, parts.v, pre, post, parts.bias))


def share_parameters(module: nn.Module, other: nn.Module) -> None:
    """Share the parameters, buffers, submodules and attributes of another module."""
    module.__dict__.update({n: v.copy() if isinstance(v, dict | set) else v for n, v in vars(other).items()})


def _with_base(weights: ComposeWeights | None, base: Tensor | None) -> ComposeWeights | None:
    """Add a static mixing [H, H] of all heads to a composition."""
    if base is None:
        return weights
    weights = ComposeWeights() if weights is None else weights
    return weights._replace(base=base[None] if weights.base is None else weights.base + base[None])


FAMILIES: dict[type[nn.Module], Family] = {}  # by timm's classes; filled in by the package


@cache
def composed_class(kind: type[nn.Module], family: Family) -> type[ComposedParts]:
    """Create the composed counterpart of a timm class: a subclass, so that isinstance checks and methods work."""
    return type(
        f"Composed{kind.__name__}", (ComposedParts, kind), {"family": family, "kind": kind, "__module__": __name__}
    )


def _empty(kind: type[nn.Module]) -> ComposedParts:
    """Create an instance of the composed counterpart without state, for unpickling."""
    made = composed_class(kind, FAMILIES[kind])
    return made.__new__(made)


def heads(x: Tensor, num_heads: int) -> Tensor:
    """[B, T, H D] to [B, H, T, D]."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def join(x: Tensor) -> Tensor:
    """[B, H, T, D] to [B, T, H D]."""
    return x.transpose(1, 2).flatten(2)


def project(module: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Project tokens [B, T, C] to q, k and v [B, H, T, D] by a fused projection, all queries first."""
    return tuple(heads(part, module.num_heads) for part in module.qkv(x).chunk(3, -1))


def one_width(module: nn.Module) -> AttentionWidths:
    """Return the input width of a fused projection."""
    return AttentionWidths(module.qkv.in_features)


def output(module: nn.Module, x: Tensor) -> Tensor:
    """Project attended values [B, H, T, D] to the output [B, T, C]."""
    return module.proj_drop(module.proj(join(x)))


def conv_output(module: nn.Module, x: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
    """Project attended values [B, H, h w, D] to the output [B, C, h, w] by a convolution."""
    return module.proj_drop(module.proj(as_image(join(x), size)))


def split_by_order(module: nn.Module, qkv: Tensor) -> tuple[Tensor, ...]:
    """Split [B, T, 3 H D] by the order of its channels: head by head, or all queries first."""
    if module.head_first:
        return heads(qkv, module.num_heads).chunk(3, -1)
    return tuple(heads(part, module.num_heads) for part in qkv.chunk(3, -1))


def as_tokens(x: Tensor) -> Tensor:
    """[B, C, h, w] to [B, h w, C]."""
    return x.flatten(2).transpose(1, 2)


def as_image(x: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
    """[B, h w, C] to [B, C, h, w]."""
    return x.transpose(1, 2).unflatten(2, tuple(size))
