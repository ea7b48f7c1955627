"""What a trained model loses where a part of its composition, or a head, is switched off (compare table 9)."""

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
WITHOUT, KIND = "without", "kind"  # settings that tell what was switched off


class ModelPart(NamedTuple):
    """What is switched off together.

    Attributes:
        kind: One of `KINDS`.
        name: What it is called.
        branches: Branches of compositions.
        head: Name of a layer, and the number of one of its heads.
    """

    kind: str
    name: str
    branches: tuple[Branch, ...] = ()
    head: tuple[str, int] | None = None

    @contextmanager
    def switched_off(self, model: nn.Module) -> Iterator[None]:
        """Let a model do without it while the context is open."""
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
    """What a measurement asks, told that its answers are of a model without a part."""

    @property
    def module(self) -> nn.Module:
        """The model."""

    def under(self, condition: str) -> Self:
        """Keep answers under a condition apart from others."""


class Ablated(NamedTuple):
    """A measurement of a model without a part."""

    measure: Measurable
    part: ModelPart

    @property
    def title(self) -> str:
        """Name it, uniquely."""
        return f"{self.measure.title}{without_title(self.part.name)}"

    def settings(self, subject: Ablatable) -> dict:
        """Tell what the numbers depend on beside the model."""
        return self.measure.settings(subject) | {WITHOUT: self.part.name, KIND: self.part.kind}

    def run(self, subject: Ablatable) -> tuple[list[Measure], str | None]:
        """Measure it; what there is to say of the measurement has been said of the whole model."""
        with self.part.switched_off(subject.module):
            return self.measure.run(subject.under(self.part.name))[0], None


def without_title(part: str) -> str:
    """Write what is added to the title of a measurement."""
    return f", without {part}"


def ablations(model: nn.Module, measures: Sequence[Measurable], kinds: Sequence[str]) -> list[Measurable]:
    """List all that is measured: the whole model, then without each part of it.

    Args:
        model: The model.
        measures: What is measured of the whole model.
        kinds: What is switched off; if there are none branches and layers, of plain attention heads.

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
