"""Scaling parts of a trained model: branches of its compositions, or heads. A factor of 0 disables a part."""

# B batch, T tokens, H heads, D head dim

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..impl.reference import BRANCHES
from ..layer import composed_layers
from ..weights import ComposeWeights, SideWeights
from .circuits import attention_layers


class Branch(NamedTuple):
    """A branch of a composition.

    Attributes:
        layer: Name of the layer.
        composition: "pre" or "post".
        branch: One of `BRANCHES`: "base", "query projection", "query gate", "key projection", "key gate".
    """

    layer: str
    composition: str
    branch: str


def composition_branches(model: nn.Module) -> list[Branch]:
    """Return the enabled branches of all layers of a model, in order of the layers.

    Raises:
        ValueError: If the model composes nothing.
    """
    found = []
    for name, layer in composed_layers(model).items():
        options = layer.options
        sides = [(side, part) for side in options.sides for part in ("projection", "gate")]
        has = {"projection": options.rank > 0, "gate": options.dynamic_gate}
        names = ["base"] * options.static_base + [f"{side} {part}" for side, part in sides if has[part]]
        found += [Branch(name, composition, branch) for composition in options.compositions for branch in names]
    return found


@contextmanager
def scale_branches(model: nn.Module, factors: Mapping[Branch, Tensor | float]) -> Iterator[None]:
    """Scale the terms that branches add to scores or weights while the context is active; 0 disables them.

    Factors that are tensors receive gradients; with activation checkpointing the backward pass must run within the
    context. Compiled models run eagerly.

    Args:
        model: The model that is called within the context.
        factors: Scalar factors by branch.

    Raises:
        ValueError: If the model has no such branch, or a factor is not a number.
    """
    known = composition_branches(model)
    by_layer: dict[str, dict[str, dict[str, Tensor | float]]] = {}
    for branch, factor in factors.items():
        if branch not in known:
            raise ValueError(f"{tuple(branch)} is not a branch of the model; expected {_listed(known)}.")
        is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
        if not is_number and not (isinstance(factor, Tensor) and factor.numel() == 1):
            raise ValueError(f"the factor of {tuple(branch)} is {factor!r}; expected a number or a scalar tensor.")
        of_layer = by_layer.setdefault(branch.layer, {"pre": {}, "post": {}})
        of_layer[branch.composition][branch.branch] = factor

    def hook(of_layer: Mapping[str, Mapping[str, Tensor | float]]) -> Callable:
        def scale(_module, _args, made):
            factors = (of_layer["pre"], of_layer["post"])
            return tuple(w if w is None else _scaled(w, by) for w, by in zip(made, factors, strict=True))

        return scale

    with ExitStack() as hooks:
        hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for name, of_layer in by_layer.items():
            handle = model.get_submodule(name).compose.register_forward_hook(hook(of_layer))
            hooks.callback(handle.remove)
        yield


@contextmanager
def scale_heads(model: nn.Module, factors: Mapping[str, Tensor]) -> Iterator[None]:
    """Scale the outputs of heads before the output projection while the context is active; 0 disables them.

    The factors receive gradients. Compiled models run eagerly. Layers may be plain attention.

    Args:
        model: The model that is called within the context.
        factors: Factors of the heads [H] by layer name.

    Raises:
        ValueError: If the model has no such layer, or the layer has a different number of heads.
    """
    layers = attention_layers(model)
    for name, factor in factors.items():
        if name not in layers:
            raise ValueError(f"layer {name!r} is not in the model; expected {', '.join(layers)}.")
        if not isinstance(factor, Tensor) or factor.shape != (layers[name].num_heads,):
            got = f"shape {list(factor.shape)}" if isinstance(factor, Tensor) else f"type {type(factor).__name__}"
            raise ValueError(f"factors of {name!r} have {got}; expected a tensor [{layers[name].num_heads}].")

    def hook(factor: Tensor):
        def scale(_module, args):
            (x,) = args
            by_head = x.unflatten(-1, (len(factor), -1)) * factor.to(x)[:, None]
            return (by_head.flatten(-2),)

        return scale

    with ExitStack() as hooks:
        hooks.enter_context(torch.compiler.set_stance("force_eager"))
        for name, factor in factors.items():
            handle = layers[name].proj.register_forward_pre_hook(hook(factor))
            hooks.callback(handle.remove)
        yield


def _listed(branches: list[Branch]) -> str:
    """Describe the accepted layers, compositions and branches."""
    return ", ".join(dict.fromkeys(part for branch in branches for part in branch))


def _scaled(weights: ComposeWeights, factors: Mapping[str, Tensor | float]) -> ComposeWeights:
    """Scale branches of a composition."""

    def by(name: str, tensor: Tensor | None) -> Tensor | None:
        factor = factors.get(name)
        if tensor is None or factor is None:
            return tensor
        return tensor * (factor.to(tensor) if isinstance(factor, Tensor) else factor)

    def side(name: str, of_side: SideWeights) -> SideWeights:
        return of_side._replace(up=by(f"{name} projection", of_side.up), gate=by(f"{name} gate", of_side.gate))

    return ComposeWeights(side("query", weights.query), side("key", weights.key), by(BRANCHES[0], weights.base))
