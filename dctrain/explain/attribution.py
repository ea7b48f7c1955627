"""Integrated gradients (Sundararajan et al., 2017) of a scalar output, over parts of the model.

Each part has a factor that increases from 0 (disabled) to 1, for all parts together. The attributions sum to the joint
effect of all parts (completeness), up to the integration error, which is reported.
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

Objective = Callable[[], Tensor]  # calls the model and returns a scalar


class PartSet(NamedTuple):
    """Parts of a model that can be scaled.

    Attributes:
        kind: Kind of the parts: "branches", "heads", or a kind defined by a trainer.
        layers: Layer name of each part, or what it belongs to.
        names: Name of each part within the layer.
        scaled: Context manager that scales the parts by factors [N], which receive gradients.
    """

    kind: str
    layers: tuple[str, ...]
    names: tuple[str, ...]
    scaled: Callable[[Tensor], AbstractContextManager]


class Attribution(NamedTuple):
    """Attribution of a scalar to parts.

    Attributes:
        parts: The parts, N of them.
        values: Attribution of each part, in the unit of the scalar [N], float64.
        whole: Value of the full model.
        without: Value with all parts disabled.
        alone: Decrease if a single part is disabled [N], float64; None if not computed.
    """

    parts: PartSet
    values: Tensor
    whole: float
    without: float
    alone: Tensor | None

    @property
    def gap(self) -> float:
        """Integration error of the sum of the attributions; decreases with more steps."""
        return float(self.values.sum()) - (self.whole - self.without)

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's rank correlation of attributions and single-part decreases; None if undefined."""
        if self.alone is None or min(len(set(found.tolist())) for found in (self.values, self.alone)) < 2:
            return None
        return float(spearman_corrcoef(self.values, self.alone))


def branch_parts(model: nn.Module) -> PartSet:
    """Return the branches of all compositions.

    Raises:
        ValueError: If the model composes nothing.
    """
    branches = composition_branches(model)
    layers, names = zip(*((one.layer, f"{one.composition} {one.branch}") for one in branches), strict=True)
    return PartSet("branches", layers, names, lambda f: scale_branches(model, dict(zip(branches, f, strict=True))))


def head_parts(model: nn.Module) -> PartSet:
    """Return the outputs of all heads of all attention layers.

    Raises:
        ValueError: If the model has no attention layers.
    """
    counts = {name: layer.num_heads for name, layer in attention_layers(model).items()}
    layers, names = zip(*((name, f"head {h}") for name, count in counts.items() for h in range(count)), strict=True)
    sizes = list(counts.values())
    return PartSet("heads", layers, names, lambda f: scale_heads(model, dict(zip(counts, f.split(sizes), strict=True))))


def kinds_of(model: nn.Module, kinds: Sequence[str]) -> tuple[str, ...]:
    """Remove "branches" from the kinds if the model composes nothing, and print a message."""
    return tuple(kind for kind in kinds if kind != "branches" or is_composed(model))


class AttributionSettings(NamedTuple):
    """Settings of an attribution.

    Attributes:
        over: Kinds of parts, attributed separately.
        steps: Integration points (Gauss-Legendre), each a forward and a backward pass.
        alone: Whether to also disable each part separately, one forward pass each.
    """

    over: Sequence[str]
    steps: int
    alone: bool = False

    def attribute(
        self, model: nn.Module, objectives: Sequence[Objective], makers: Mapping[str, Callable[[], PartSet]]
    ) -> list[Attribution]:
        """Attribute the sum of scalars to parts of a model.

        Args:
            model: The model, in evaluation mode; its weights need no gradient.
            objectives: Functions that compute the scalar of one batch.
            makers: Functions that return the parts of additional kinds.

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
    """Attribute the sum of scalars, one per batch, to parts.

    Args:
        parts: The parts.
        objectives: Functions that compute the scalar of one batch with a model in evaluation mode.
        device: Device of the model.
        steps: Integration points (Gauss-Legendre), each a forward and a backward pass over each batch.
        alone: Whether to also disable each part separately, N forward passes over each batch.

    Raises:
        UserError: If the scalar is not finite.
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
                raise UserError("the model's output is not finite: its weights are damaged or too large.")
            values += _integrate(compute, ones, steps)
    whole, without, *rest = results.tolist()
    lost = whole - torch.tensor(rest, dtype=torch.float64) if alone else None
    return Attribution(parts, values, whole, without, lost)


def _integrate(compute: Callable[[Tensor], Tensor], ones: Tensor, steps: int) -> Tensor:
    """Integrate the gradient of a function of factors [N] from zeros to ones."""
    gradients = IntegratedGradients(lambda factors: compute(factors[0])[None])
    return gradients.attribute(ones[None], n_steps=steps, internal_batch_size=1)[0].detach().double().cpu()
