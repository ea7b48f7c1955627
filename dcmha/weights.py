"""The tensors of a composition and the module that makes them from tokens (paper, section 3, equations 5 and 6)."""

# B batch, T query tokens, S key tokens, H heads, C model width, R compose rank, G head groups

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

RMS_EPS = 1e-6


class ComposeWeights(NamedTuple):
    """The input-dependent and static matrices of one composition. Any branch may be None.

    Attributes:
        query_down: [B, T, R, H], contracts the old heads; already normalised over the heads of its group.
        query_up: [B, T, R, H], expands to the new heads.
        query_gate: [B, T, H], already through tanh.
        key_down: [B, S, R, H].
        key_up: [B, S, R, H].
        key_gate: [B, S, H].
        base: [G, H/G, H/G], (from, to), added on top of the identity.
    """

    query_down: Tensor | None = None
    query_up: Tensor | None = None
    query_gate: Tensor | None = None
    key_down: Tensor | None = None
    key_up: Tensor | None = None
    key_gate: Tensor | None = None
    base: Tensor | None = None


class TokenWeights(NamedTuple):
    """The part of one composition that one side's tokens make: down and up [B, T, R, H], gate [B, T, H]."""

    down: Tensor | None
    up: Tensor | None
    gate: Tensor | None


NO_TOKEN_WEIGHTS = TokenWeights(None, None, None)


def join_sides(query: TokenWeights, key: TokenWeights, base: Tensor | None) -> ComposeWeights:
    """Put the query side, the key side and the static base of one composition together."""
    return ComposeWeights(*query, *key, base)


class ComposeProjection(nn.Module):
    """Make the compose weights of a layer from its tokens.

    One MLP per side (query, key), composition (pre, post) and head group makes `down` and `up`; one linear map with
    tanh makes the gate. Parameters of all of them are fused, side-major then composition-major, so that a layer needs
    two matrix products of width C:

        hidden [N * G * K, C]        first layer of the MLPs, K = 2RH/G, N = sides * compositions
        project [N * G, K, 2RH/G]    second layer; output columns are (R down rows, R up rows) x heads
        gate [N * H, C]
        base [compositions, G, H/G, H/G]

    They are plain parameters: no `nn.Linear`, so that a model that re-initialises its linear layers leaves them alone.

    Args:
        dim: Width C of the tokens.
        num_heads: Heads H of the layer.
        rank: Rank R of the dynamic projection of each group; 0 leaves it out.
        pre_compose: Make weights for the composition of scores.
        post_compose: Make weights for the composition of weights.
        query_wise: Make the query side.
        key_wise: Make the key side.
        dynamic_gate: Make the gates.
        static_base: Learn a static base, initialised N(0, 0.1 sqrt(G/H)).
        num_groups: Head groups G (section 3.2).
        device: Where the parameters live.
        dtype: Their dtype.

    Raises:
        ValueError: If heads do not divide into groups, `rank` is negative, or no branch is left.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rank: int = 2,
        pre_compose: bool = True,
        post_compose: bool = True,
        query_wise: bool = True,
        key_wise: bool = True,
        dynamic_gate: bool = True,
        static_base: bool = False,
        num_groups: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(rank, int) or rank < 0:
            raise ValueError(f"rank={rank!r} must be an integer, 0 (no dynamic projection) or more.")
        self.num_sides = query_wise + key_wise
        self.num_compositions = pre_compose + post_compose
        has_dynamic = self.num_sides > 0 and (rank > 0 or dynamic_gate)
        if not isinstance(num_groups, int) or num_groups < 1 or num_heads % num_groups:
            raise ValueError(f"num_groups={num_groups} must be a positive divisor of num_heads={num_heads}.")
        if not self.num_compositions or not (has_dynamic or static_base):
            raise ValueError(
                "nothing is left to compose: enable pre_compose or post_compose, and static_base or a dynamic branch "
                f"(got {pre_compose=}, {post_compose=}, {query_wise=}, {key_wise=}, {rank=}, {dynamic_gate=}, "
                f"{static_base=}); for plain attention leave the projection out."
            )
        self.dim, self.num_heads, self.num_groups, self.rank = dim, num_heads, num_groups, rank
        self.pre_compose, self.post_compose = pre_compose, post_compose
        self.query_wise, self.key_wise = query_wise, key_wise
        self.group_width = 2 * rank * num_heads // num_groups
        self._make_parameters(dynamic_gate, static_base, {"device": device, "dtype": dtype})
        self.init_weights()

    def _make_parameters(self, dynamic_gate: bool, static_base: bool, dd: dict) -> None:
        slots, groups, width = self.num_sides * self.num_compositions, self.num_groups, self.group_width
        group_heads = self.num_heads // groups
        has_projection, has_gate = slots > 0 and width > 0, slots > 0 and dynamic_gate
        self.hidden = nn.Parameter(torch.empty(slots * groups * width, self.dim, **dd)) if has_projection else None
        self.project = nn.Parameter(torch.empty(slots * groups, width, width, **dd)) if has_projection else None
        self.gate = nn.Parameter(torch.empty(slots * self.num_heads, self.dim, **dd)) if has_gate else None
        shape = (self.num_compositions, groups, group_heads, group_heads)
        self.base = nn.Parameter(torch.empty(shape, **dd)) if static_base else None

    def init_weights(self) -> None:
        """Initialise as the paper does (section 4, implementation details), each group as a layer of H/G heads."""
        heads = self.num_heads // self.num_groups
        if self.hidden is not None:
            nn.init.normal_(self.hidden, std=math.sqrt(2.0 / (self.dim + self.group_width)))  # Xavier, per MLP
            nn.init.normal_(self.project, std=0.02 / (math.sqrt(self.group_width) * (heads + self.rank)))
        if self.gate is not None:
            nn.init.normal_(self.gate, std=0.05 * math.sqrt(2.0 / (self.dim + heads)))
        if self.base is not None:
            nn.init.normal_(self.base, std=0.1 * math.sqrt(1.0 / heads))

    def reset_parameters(self) -> None:
        """Initialise again; the name torch and timm look for."""
        self.init_weights()

    def forward(self, x: Tensor) -> tuple[ComposeWeights | None, ComposeWeights | None]:
        """Make the weights of both compositions for self-attention.

        Args:
            x: Tokens [B, T, C].

        Returns:
            The pre and the post composition, None where it is switched off.
        """
        sides = self.token_weights(x)
        query = sides[0] if self.query_wise else None
        key = sides[-1] if self.key_wise else None
        return self.join(query, key)

    def token_weights(self, x: Tensor) -> list[list[TokenWeights]]:
        """Make what the tokens `x` [B, T, C] contribute: for each side present, for each composition, its weights."""
        B, T, _ = x.shape
        num_sides, num_compositions = self.num_sides, self.num_compositions
        slots = num_sides * num_compositions
        downs = ups = gates = [None] * slots
        if self.hidden is not None:
            downs, ups = self._low_rank(x, slots)
        if self.gate is not None:
            gates = torch.tanh(F.linear(x, self.gate)).view(B, T, slots, self.num_heads).unbind(2)
        flat = [TokenWeights(*parts) for parts in zip(downs, ups, gates, strict=True)]
        return [flat[i * num_compositions : (i + 1) * num_compositions] for i in range(num_sides)]

    def _low_rank(self, x: Tensor, slots: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Run the weight MLPs (equation 5); RMS-norm over the heads of a group on the down rows only."""
        B, T, _ = x.shape
        hidden = F.gelu(F.linear(x, self.hidden)).view(B * T, slots * self.num_groups, self.group_width)
        z = torch.bmm(hidden.transpose(0, 1), self.project)  # [slots * G, B * T, 2RH/G]
        z = z.view(slots, self.num_groups, B, T, 2, self.rank, self.num_heads // self.num_groups)
        z = z.permute(4, 0, 2, 3, 5, 1, 6)  # [2, slots, B, T, R, G, H/G]
        down = F.rms_norm(z[0].float() if z.dtype.itemsize < 4 else z[0], z.shape[-1:], eps=RMS_EPS).to(z.dtype)
        return down.flatten(-2).unbind(0), z[1].flatten(-2).unbind(0)

    def join(
        self, query: list[TokenWeights] | None, key: list[TokenWeights] | None
    ) -> tuple[ComposeWeights | None, ComposeWeights | None]:
        """Put both sides' weights (one entry per composition, None for a side that is off) and the base together."""
        none = [NO_TOKEN_WEIGHTS] * self.num_compositions
        base = [None] * self.num_compositions if self.base is None else self.base.unbind(0)
        joined = [join_sides(*parts) for parts in zip(query or none, key or none, base, strict=True)]
        return (joined[0] if self.pre_compose else None), (joined[-1] if self.post_compose else None)

    def extra_repr(self) -> str:
        """Describe the configuration in `print(module)`."""
        return (
            f"dim={self.dim}, num_heads={self.num_heads}, rank={self.rank}, pre_compose={self.pre_compose}, "
            f"post_compose={self.post_compose}, query_wise={self.query_wise}, key_wise={self.key_wise}, "
            f"dynamic_gate={self.gate is not None}, static_base={self.base is not None}, num_groups={self.num_groups}"
        )
