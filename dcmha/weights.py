"""Compose weights and the module that computes them from tokens (paper, section 3, equations 5 and 6)."""

# B batch, T query tokens, S key tokens, H heads, C model width, R compose rank, G head groups

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .checks import check_factory, check_integers
from .options import ComposeOptions, compose_options_of

RMS_EPS = 1e-6


class SideWeights(NamedTuple):
    """Compose weights of one composition computed from the tokens of one side, queries or keys. Each branch may be
    None.

    Attributes:
        down: Down projection [B, T or S, R, H], contracts the input heads; normalized over the heads of its group.
        up: Up projection [B, T or S, R, H], expands to the output heads; None if and only if `down` is.
        gate: Gate [B, T or S, H], after tanh.
    """

    down: Tensor | None = None
    up: Tensor | None = None
    gate: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "SideWeights":
        """Apply a function to all tensors."""
        return SideWeights(*(part if part is None else function(part) for part in self))


class ComposeWeights(NamedTuple):
    """Compose weights of both sides of one composition, and its static base.

    Attributes:
        query: Compose weights from the query's token.
        key: Compose weights from the key's token.
        base: Static base [G, H/G, H/G], (from, to), added to the identity; None for none.
    """

    query: SideWeights = SideWeights()
    key: SideWeights = SideWeights()
    base: Tensor | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "ComposeWeights":
        """Apply a function to all tensors."""
        base = self.base if self.base is None else function(self.base)
        return ComposeWeights(self.query.map(function), self.key.map(function), base)


class ComposeProjection(nn.Module):
    """Compute the compose weights of a layer from its tokens.

    One MLP per side (query, key), composition (pre, post) and head group computes `down` and `up`; a linear map with
    tanh computes the gate. A side and a composition together are a *role*. The parameters of all roles are fused,
    side-major then composition-major, so that a layer needs two matrix products of width C:

        hidden [roles * G * K, C]           first layer of the MLPs, K = 2RH/G
        project [roles * G, K, 2RH/G]       second layer; output columns are (R down rows, R up rows) x heads
        gate [roles * H, C]
        base [compositions, G, H/G, H/G]    initialized N(0, 0.1 sqrt(G/H))

    They are plain parameters rather than `nn.Linear`, so that a model that re-initializes its linear layers does not
    change them.

    Args:
        dim: Width C of the tokens.
        num_heads: Heads H of the layer.
        device: Where the parameters live.
        dtype: Dtype of the parameters.
        **options: Fields of `ComposeOptions`.

    Raises:
        ValueError: If an option is out of range, heads do not divide into groups, or no branch is enabled.
        TypeError: If an option is unknown.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options,
    ) -> None:
        super().__init__()
        check_integers(dim=dim, num_heads=num_heads)
        check_factory(device, dtype)
        self.options = ComposeOptions(**options)
        self.options.check_composes()
        self.dim, self.num_heads = dim, num_heads
        self.group_heads = self.options.group_heads(num_heads)
        self.group_width = 2 * self.options.rank * self.group_heads
        self.roles = tuple(product(self.options.sides, self.options.compositions))
        self._make_parameters({"device": device, "dtype": dtype})
        self.init_weights()

    def _make_parameters(self, dd: dict) -> None:
        def parameter(*shape: int) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(shape, **dd)) if all(shape) else None

        roles, width, heads = len(self.roles), self.group_width, self.group_heads
        groups = self.options.num_groups
        self.hidden = parameter(roles * groups * width, self.dim)
        self.project = parameter(roles * groups, width, width)
        self.gate = parameter(roles * self.num_heads * self.options.dynamic_gate, self.dim)
        self.base = parameter(len(self.options.compositions) * self.options.static_base, groups, heads, heads)

    def init_weights(self) -> None:
        """Initialize as in the paper (section 4, implementation details), each group as a layer of H/G heads."""
        heads, rank = self.group_heads, self.options.rank
        if self.hidden is not None:
            nn.init.normal_(self.hidden, std=math.sqrt(2.0 / (self.dim + self.group_width)))  # Xavier, per MLP
            nn.init.normal_(self.project, std=0.02 / (math.sqrt(self.group_width) * (heads + rank)))
        if self.gate is not None:
            nn.init.normal_(self.gate, std=0.05 * math.sqrt(2.0 / (self.dim + heads)))
        if self.base is not None:
            nn.init.normal_(self.base, std=0.1 * math.sqrt(1.0 / heads))

    def reset_parameters(self) -> None:
        """Initialize again; the method name that PyTorch and timm call."""
        self.init_weights()

    def forward(self, x: Tensor) -> tuple[ComposeWeights | None, ComposeWeights | None]:
        """Compute the weights of both compositions.

        Args:
            x: Tokens [B, T, C] of self-attention, both queries and keys.

        Returns:
            Pre- and post-composition; None if disabled.
        """
        if x.dim() != 3 or x.shape[-1] != self.dim or not x.is_floating_point():
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; expected floating [B, T, C] with C = {self.dim}.")
        made = dict(zip(self.roles, self._role_weights(x), strict=True))
        bases = {} if self.base is None else dict(zip(self.options.compositions, self.base.unbind(0), strict=True))
        pre, post = (
            ComposeWeights(
                made.get(("query", composition), SideWeights()),
                made.get(("key", composition), SideWeights()),
                bases.get(composition),
            )
            if composition in self.options.compositions
            else None
            for composition in ("pre", "post")
        )
        return pre, post

    def _role_weights(self, x: Tensor) -> Iterator[SideWeights]:
        """Compute the compose weights of each role from tokens `x` [B, T, C]."""
        downs = ups = gates = [None] * len(self.roles)
        if self.hidden is not None:
            downs, ups = self._low_rank(x)
        if self.gate is not None:
            gates = torch.tanh(F.linear(x, self.gate)).unflatten(-1, (-1, self.num_heads)).unbind(2)
        return map(SideWeights, downs, ups, gates)

    def _low_rank(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Compute the MLPs of equation 5; RMSNorm over the heads of a group on the down projections only."""
        B, T, _ = x.shape
        roles, groups, rank = len(self.roles), self.options.num_groups, self.options.rank
        hidden = F.gelu(F.linear(x, self.hidden)).view(B * T, roles * groups, self.group_width)
        z = torch.bmm(hidden.transpose(0, 1), self.project)  # [roles * G, B * T, 2RH/G]
        z = z.view(roles, groups, B, T, 2, rank, self.group_heads)
        z = z.permute(4, 0, 2, 3, 5, 1, 6)  # [2, roles, B, T, R, G, H/G]
        down = F.rms_norm(z[0].float() if z.dtype.itemsize < 4 else z[0], z.shape[-1:], eps=RMS_EPS).to(z.dtype)
        return down.flatten(-2).unbind(0), z[1].flatten(-2).unbind(0)

    def extra_repr(self) -> str:
        """Describe the configuration in `print(module)`."""
        options = ", ".join(f"{name}={value}" for name, value in compose_options_of(self.options).items())
        return f"dim={self.dim}, num_heads={self.num_heads}, {options}"
