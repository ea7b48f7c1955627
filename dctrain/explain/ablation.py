"""Ablation of trained models: evaluation with parts of the composition, or heads, disabled (compare table 9)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, Self

import torch
from torch import nn

from dcmha.analysis import Branch, attention_layers, composition_branches, scale_branches, scale_heads

from ..errors import as_user_error
from ..evaluation.results import Measure
from ..evaluation.run import Measurable
from .selectors import is_composed

KINDS = ("branches", "layers", "heads")
WITHOUT, KIND = "without", "kind"  # settings that name the disabled part


class ModelPart(NamedTuple):
    """A part of a model that is disabled.

    Attributes:
        kind: One of `KINDS`.
        name: Name of the part.
        branches: Its branches of compositions.
        head: Layer name and index of a head.
    """

    kind: str
    name: str
    branches: tuple[Branch, ...] = ()
    head: tuple[str, int] | None = None

    @contextmanager
    def switched_off(self, model: nn.Module) -> Iterator[None]:
        """Disable the part of a model while the context is active."""
        if self.head is None:
            with scale_branches(model, dict.fromkeys(self.branches, 0.0)):
                yield
            return
        layer, head = self.head
        factors = torch.ones(attention_layers(model)[layer].num_heads)
        factors[head] = 0.0
        with scale_heads(model, {layer: factors}):
            yield


class Ablatable(Protocol):
    """Subject of a measurement that supports a disabled part."""

    @property
    def module(self) -> nn.Module:
        """The model."""

    def under(self, condition: str) -> Self:
        """Return a subject whose answers are cached separately for a condition."""


class Ablated(NamedTuple):
    """A measurement of a model without a part."""

    measure: Measurable
    part: ModelPart

    @property
    def title(self) -> str:
        """Unique title."""
        return f"{self.measure.title}{without_title(self.part.name)}"

    def settings(self, subject: Ablatable) -> dict:
        """Settings that the numbers depend on, other than the model."""
        return self.measure.settings(subject) | {WITHOUT: self.part.name, KIND: self.part.kind}

    def run(self, subject: Ablatable) -> tuple[list[Measure], str | None]:
        """Measure; the note was already printed for the full model."""
        with self.part.switched_off(subject.module):
            return self.measure.run(subject.under(self.part.name))[0], None


def without_title(part: str) -> str:
    """Return the suffix of a measurement's title."""
    return f", without {part}"


def ablations(model: nn.Module, measures: Sequence[Measurable], kinds: Sequence[str]) -> list[Measurable]:
    """Return all measurements: of the full model, then with each part disabled.

    Args:
        model: The model.
        measures: Measurements of the full model.
        kinds: Kinds of parts to disable; if empty, branches and layers, or heads for plain attention.

    Raises:
        UserError: If the model has no such parts.
    """
    kinds = kinds or (("branches", "layers") if is_composed(model) else ("heads",))
    parts = [part for kind in kinds for part in _parts(model, kind)]
    return [*measures, *(Ablated(measure, part) for part in parts for measure in measures)]


def _parts(model: nn.Module, kind: str) -> list[ModelPart]:
    with as_user_error(f"off={kind}", ValueError):
        if kind == "heads":
            layers = attention_layers(model).items()
            return [
                ModelPart(kind, f"head {h} of {name}", head=(name, h)) for name, x in layers for h in range(x.num_heads)
            ]
        known = composition_branches(model)
    if kind == "layers":
        groups = {f"composition of {one.layer}": [b for b in known if b.layer == one.layer] for one in known}
    else:
        groups = {"composition": known}
        groups |= {f"{one.composition}-composition": [b for b in known if b[1] == one[1]] for one in known}
        groups |= {f"{one.composition} {one.branch}": [b for b in known if b[1:] == one[1:]] for one in known}
    return [ModelPart(kind, name, tuple(branches)) for name, branches in groups.items()]
