"""Integrated gradients (Sundararajan et al., 2017) of one number that a model computes, over parts of the model.

A part has a factor that goes from 0, where it is switched off, to 1, all parts together. What the parts are credited
with sums up to what they change together (completeness), but for the error of the integral, which is told.
"""

# N parts

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from captum.attr import IntegratedGradients
from torch import Tensor, nn
from torchmetrics.functional import spearman_corrcoef
from tqdm import tqdm

from dcmha.analysis import attention_layers, composition_branches, scale_branches, scale_heads

from ..errors import UserError, as_user_error
from .selectors import is_composed

Objective = Callable[[], Tensor]  # calls the model, gives a scalar


class PartSet(NamedTuple):
    """What can be turned down.

    Attributes:
        kind: What they are: "branches", "heads", and what a trainer adds.
        layers: Of each part, the name of its layer, or what it is a part of.
        names: Of each part, its name there.
        scaled: Multiplies them by factors [N] while its context is open; gradients reach the factors.
    """

    kind: str
    layers: tuple[str, ...]
    names: tuple[str, ...]
    scaled: Callable[[Tensor], AbstractContextManager]


class Attribution(NamedTuple):
    """What parts are credited with.

    Attributes:
        parts: The parts, N of them.
        values: Of each, its credit, in the unit of what is computed [N], float64.
        whole: What the model computes.
        without: What it computes without all parts.
        alone: What is lost where a part alone is switched off [N], float64; None if that was not asked.
    """

    parts: PartSet
    values: Tensor
    whole: float
    without: float
    alone: Tensor | None

    @property
    def gap(self) -> float:
        """By how much the values miss their sum; more steps make it smaller."""
        return float(self.values.sum()) - (self.whole - self.without)

    @property
    def rank_correlation(self) -> float | None:
        """How alike credits and losses alone order the parts: Spearman's, from -1 to 1; None of what has no order."""
        if self.alone is None or min(len(set(found.tolist())) for found in (self.values, self.alone)) < 2:
            return None
        return float(spearman_corrcoef(self.values, self.alone))


def branch_parts(model: nn.Module) -> PartSet:
    """List the branches of all compositions.

    Raises:
        ValueError: If the model composes nothing.
    """
    branches = composition_branches(model)
    layers, names = zip(*((one.layer, f"{one.composition} {one.branch}") for one in branches), strict=True)
    return PartSet("branches", layers, names, lambda f: scale_branches(model, dict(zip(branches, f, strict=True))))


def head_parts(model: nn.Module) -> PartSet:
    """List what each head of each attention layer gives to the output projection.

    Raises:
        ValueError: If the model has no attention layers.
    """
    counts = {name: layer.num_heads for name, layer in attention_layers(model).items()}
    layers, names = zip(*((name, f"head {h}") for name, count in counts.items() for h in range(count)), strict=True)
    sizes = list(counts.values())
    return PartSet("heads", layers, names, lambda f: scale_heads(model, dict(zip(counts, f.split(sizes), strict=True))))


def kinds_of(model: nn.Module, kinds: Sequence[str]) -> tuple[str, ...]:
    """Leave "branches" out of some kinds of parts if the model composes nothing, and say so."""
    return tuple(kind for kind in kinds if kind != "branches" or is_composed(model))


class AttributionSettings(NamedTuple):
    """What is credited, and how.

    Attributes:
        over: Kinds of parts, each credited by itself.
        steps: Points of the integral (Gauss-Legendre), each a forward and a backward pass.
        alone: Also switch off each part by itself, a forward pass for each.
    """

    over: Sequence[str]
    steps: int
    alone: bool = False

    def attribute(
        self, model: nn.Module, objectives: Sequence[Objective], makers: Mapping[str, Callable[[], PartSet]]
    ) -> list[Attribution]:
        """Credit parts of a model with the sum of some scalars.

        Args:
            model: The model, in evaluation mode; its weights need no gradient.
            objectives: Each computes a scalar by it, of one batch.
            makers: List the parts of kinds that not every model has; branches and heads are known.

        Raises:
            UserError: If the model has no such parts.
        """
        makers = {"branches": lambda: branch_parts(model), "heads": lambda: head_parts(model), **makers}
        device = next(model.parameters()).device
        parts = []
        for kind in self.over:
            with as_user_error(f"over={kind}", ValueError):
                parts.append(makers[kind]())
        return [attribute_parts(one, objectives, device, self.steps, self.alone) for one in parts]


def attribute_parts(
    parts: PartSet, objectives: Sequence[Objective], device: torch.device, steps: int, alone: bool
) -> Attribution:
    """Credit parts with the sum of some scalars, which the model computes of one batch each.

    Args:
        parts: What is credited.
        objectives: Each computes a scalar by a model in evaluation mode.
        device: Where the model is.
        steps: Points of the integral (Gauss-Legendre), each a forward and a backward pass over each batch.
        alone: Also switch off each part by itself, N forward passes over each batch.

    Raises:
        UserError: If what is computed is not finite.
    """
    ones = torch.ones(len(parts.names), device=device)
    masks = [ones, torch.zeros_like(ones), *(ones - torch.eye(len(ones), device=device) if alone else ())]
    values, results = torch.zeros(len(ones), dtype=torch.float64), torch.zeros(len(masks), dtype=torch.float64)
    with tqdm(total=len(objectives) * (steps + len(masks)), desc=parts.kind, unit="pass", leave=False) as bar:
        for objective in objectives:

            def compute(factors: Tensor, objective: Objective = objective) -> Tensor:
                bar.update()
                with parts.scaled(factors):
                    return objective()

            with torch.no_grad():
                results += torch.tensor([float(compute(mask)) for mask in masks], dtype=torch.float64)
            if not results.isfinite().all():
                raise UserError("what the model computes is not finite: its weights are damaged, or too large.")
            values += _integrate(compute, ones, steps)
    whole, without, *rest = results.tolist()
    lost = whole - torch.tensor(rest, dtype=torch.float64) if alone else None
    return Attribution(parts, values, whole, without, lost)


def _integrate(compute: Callable[[Tensor], Tensor], ones: Tensor, steps: int) -> Tensor:
    """Integrate the gradient of a function of factors [N] from zeros to ones."""
    gradients = IntegratedGradients(lambda factors: compute(factors[0])[None])
    return gradients.attribute(ones[None], n_steps=steps, internal_batch_size=1)[0].detach().double().cpu()
