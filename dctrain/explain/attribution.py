"""Integrated gradients (Sundararajan et al., 2017) of one number that a model computes, over parts of the model.

A part has a factor that goes from 0, where it is switched off, to 1, all parts together. What the parts are credited
with sums up to what they change together (completeness), but for the error of the integral, which is told.
"""

# N parts

from collections.abc import Callable
from typing import NamedTuple

import torch
from captum.attr import IntegratedGradients
from torch import Tensor, nn

from dcmha.analysis import attention_layers, composition_branches, scale_branches, scale_heads

Objective = Callable[[], Tensor]  # calls the model, gives a scalar


class Attribution(NamedTuple):
    """What parts are credited with.

    Attributes:
        kind: What the parts are: "branches", "heads", and what a trainer adds.
        layers: Of each part, the name of its layer, or what it is a part of.
        names: Of each part, its name there.
        values: Of each part, in the unit of what is computed [N].
        whole: What the model computes.
        without: What it computes without all parts.
    """

    kind: str
    layers: tuple[str, ...]
    names: tuple[str, ...]
    values: Tensor
    whole: float
    without: float

    @property
    def gap(self) -> float:
        """By how much the values miss their sum; more steps make it smaller."""
        return float(self.values.sum()) - (self.whole - self.without)


def attribute_branches(model: nn.Module, objective: Objective, steps: int) -> Attribution:
    """Credit the branches of all compositions.

    Args:
        model: What `objective` calls, in evaluation mode.
        objective: Computes the number.
        steps: Points of the integral (Gauss-Legendre), each a forward and a backward pass.

    Raises:
        ValueError: If the model composes nothing.
    """
    branches = composition_branches(model)

    def compute(factors: Tensor) -> Tensor:
        with scale_branches(model, dict(zip(branches, factors, strict=True))):
            return objective()

    layers, names = zip(*((one.layer, f"{one.composition} {one.branch}") for one in branches), strict=True)
    return integrate("branches", layers, names, compute, _device(model), steps)


def attribute_heads(model: nn.Module, objective: Objective, steps: int) -> Attribution:
    """Credit what each head of each attention layer gives to the output projection; arguments as above.

    Raises:
        ValueError: If the model has no attention layers.
    """
    counts = {name: layer.num_heads for name, layer in attention_layers(model).items()}

    def compute(factors: Tensor) -> Tensor:
        with scale_heads(model, dict(zip(counts, factors.split(list(counts.values())), strict=True))):
            return objective()

    layers, names = zip(*((name, f"head {h}") for name, count in counts.items() for h in range(count)), strict=True)
    return integrate("heads", layers, names, compute, _device(model), steps)


def integrate(
    kind: str,
    layers: tuple[str, ...],
    names: tuple[str, ...],
    compute: Callable[[Tensor], Tensor],
    device: torch.device,
    steps: int,
) -> Attribution:
    """Integrate the gradient of `compute`, a function of factors [N], from zeros to ones."""
    ones = torch.ones(1, len(names), device=device)

    def forward(factors: Tensor) -> Tensor:
        return compute(factors[0])[None]

    with torch.no_grad():
        whole, without = (float(compute(factors[0])) for factors in (ones, torch.zeros_like(ones)))
    values = IntegratedGradients(forward).attribute(ones, n_steps=steps, internal_batch_size=1)
    return Attribution(kind, layers, names, values[0].detach().double().cpu(), whole, without)


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
