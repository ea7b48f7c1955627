"""Statistics of compositions over many tokens: distance from the identity, effective rank, dependence on the tokens.

The composition of query i and key j is a matrix over heads, I + base + Mq_i + Mk_j (paper, equation 8), where each M is
a low-rank projection plus a diagonal gate. Scores and attention weights are not used here.
"""

# B batch, T query tokens, S key tokens, H heads, G head groups

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..checks import check_integers
from ..layer import ComposedAttentionBase, composed_layers
from ..weights import ComposeWeights

PAIRS = 64  # random pairs per sequence for the effective rank


def branch_matrices(weights: ComposeWeights, num_heads: int, num_groups: int) -> dict[str, Tensor]:
    """Convert the branches of a composition to matrices from heads (rows) to heads (columns), zero between groups.

    Returns:
        Matrices of the enabled branches by name: "base" [1, 1, H, H], "query projection" and "query gate" [B, T, H, H],
        "key projection" and "key gate" [B, S, H, H].
    """
    made = {}
    if weights.base is not None:
        made["base"] = torch.block_diag(*weights.base)[None, None]
    for name, side in (("query", weights.query), ("key", weights.key)):
        if side.down is not None:
            group = torch.arange(num_heads, device=side.down.device) // (num_heads // num_groups)
            same = group[:, None] == group[None, :]
            made[f"{name} projection"] = torch.einsum("btrh,btrg->bthg", side.down, side.up) * same
        if side.gate is not None:
            made[f"{name} gate"] = side.gate.diag_embed()
    return made


def mean_composition(weights: ComposeWeights, num_heads: int, num_groups: int) -> Tensor:
    """Average a composition over the batch and all pairs: I + base + mean over queries of Mq + mean over keys of Mk.

    Returns:
        [H, H], row: input head, column: output head, zero between groups.
    """
    means = [matrices.mean((0, 1)) for matrices in branch_matrices(weights, num_heads, num_groups).values()]
    return torch.stack([torch.eye(num_heads, device=means[0].device, dtype=means[0].dtype), *means]).sum(0)


class Spread(NamedTuple):
    """Mean and standard deviation."""

    mean: float
    std: float


class Mixing(NamedTuple):
    """Statistics of one composition of one layer.

    Attributes:
        sizes: Frobenius norm of each branch's matrix relative to that of the identity (sqrt(H)), over tokens.
        effective_rank: Effective rank of the full matrix over random pairs: exp of the entropy of its normalized
            singular values (Roy and Vetterli, 2007); H for the identity.
        shares: Shares of the mean squared distance to the identity that are "static" (equal for all pairs) and that
            vary with the "query" and with the "key". They sum to 1, or are 0 if nothing is added.
    """

    sizes: dict[str, Spread]
    effective_rank: Spread
    shares: dict[str, float]


class Sums:
    """Sums over tokens of matrices [H, H] and of their norms, in float64."""

    def __init__(self) -> None:
        self.count, self.norm, self.square, self.matrix = 0, 0.0, 0.0, torch.zeros(())

    def add(self, matrices: Tensor) -> None:
        """Add matrices [B, tokens, H, H]."""
        matrices = matrices.flatten(0, 1).double()
        norms = matrices.norm(dim=(-2, -1))
        self.count += len(matrices)
        self.norm += float(norms.sum())
        self.square += float(norms.square().sum())
        self.matrix = self.matrix.to(matrices) + matrices.sum(0)

    def mean(self) -> Tensor:
        """Return the mean matrix [H, H]."""
        return self.matrix / self.count

    def variance(self) -> float:
        """Return the mean squared distance to the mean matrix."""
        return max(0.0, self.square / self.count - float(self.mean().square().sum()))

    def spread(self) -> Spread:
        """Return mean and standard deviation of the norms."""
        mean = self.norm / self.count
        return Spread(mean, max(0.0, self.square / self.count - mean**2) ** 0.5)


class MixingMeter:
    """Accumulates the weights of one composition over batches; uses about 9 B T H^2 floats during an update.

    Args:
        num_heads: Heads H.
        num_groups: Head groups G.

    Raises:
        ValueError: If a number is less than 1, or the heads are not divisible by the groups.
    """

    def __init__(self, num_heads: int, num_groups: int) -> None:
        check_integers(num_heads=num_heads, num_groups=num_groups)
        if num_heads % num_groups:
            raise ValueError(f"num_groups={num_groups} must divide num_heads={num_heads}.")
        self.num_heads, self.num_groups = num_heads, num_groups
        self.branches: dict[str, Sums] = {}
        self.sides: dict[str, Sums] = {}
        self.ranks: list[Tensor] = []
        self.generator = torch.Generator().manual_seed(0)

    @torch.no_grad()
    def add(self, weights: ComposeWeights) -> None:
        """Add the tokens of a batch."""
        made = branch_matrices(weights.map(Tensor.float), self.num_heads, self.num_groups)
        sides: dict[str, Tensor] = {}
        for name, matrices in made.items():
            self.branches.setdefault(name, Sums()).add(matrices)
            side = name.partition(" ")[0]
            sides[side] = sides[side] + matrices if side in sides else matrices
        pairs = torch.eye(self.num_heads, device=matrices.device)
        for side, matrices in sides.items():
            self.sides.setdefault(side, Sums()).add(matrices)
            drawn = torch.randint(matrices.shape[1], (PAIRS,), generator=self.generator)
            pairs = pairs + matrices[:, drawn.to(matrices.device)]
        self.ranks.append(effective_rank(pairs).flatten().cpu())

    def mixing(self) -> Mixing:
        """Return the statistics of all tokens so far.

        Raises:
            ValueError: If no tokens were added.
        """
        if not self.ranks:
            raise ValueError("no composition has been added.")
        unit = self.num_heads**0.5
        sizes = {name: Spread(*(value / unit for value in sums.spread())) for name, sums in self.branches.items()}
        parts = {"static": float(torch.stack([sums.mean() for sums in self.sides.values()]).sum(0).square().sum())}
        parts |= {side: self.sides[side].variance() if side in self.sides else 0.0 for side in ("query", "key")}
        total = sum(parts.values()) or 1.0
        ranks = torch.cat(self.ranks)
        rank = Spread(float(ranks.mean()), float(ranks.std(correction=0)))
        return Mixing(sizes, rank, {name: part / total for name, part in parts.items()})


def effective_rank(matrices: Tensor) -> Tensor:
    """Compute exp of the entropy of the normalized singular values of matrices [..., H, H]; zeros have rank 1."""
    values = torch.linalg.svdvals(matrices.double())
    values = values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)
    return torch.special.entr(values).sum(-1).exp()


@contextmanager
def measure_mixing(model: nn.Module) -> Iterator[dict[str, dict[str, MixingMeter]]]:
    """Measure the compositions of every layer in all calls while the context is active.

        with torch.no_grad(), measure_mixing(model) as meters:
            for x in batches:
                model(x)
        meters["blocks.0.attn"]["post"].mixing().sizes

    Compiled models run eagerly within the context.

    Yields:
        Meters by layer name and by "pre" or "post", for the enabled compositions.

    Raises:
        ValueError: If the model composes nothing.
    """
    layers = composed_layers(model)
    meters: dict[str, dict[str, MixingMeter]] = {name: {} for name in layers}

    def add_weights(name: str, layer: ComposedAttentionBase, _module, _args, made) -> None:
        for composition, weights in zip(("pre", "post"), made, strict=True):
            if weights is not None:
                new = MixingMeter(layer.num_heads, layer.num_groups)
                meters[name].setdefault(composition, new).add(weights)

    hooks = [layer.compose.register_forward_hook(partial(add_weights, name, layer)) for name, layer in layers.items()]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield meters
    finally:
        for hook in hooks:
            hook.remove()
