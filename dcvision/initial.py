"""Weights that an image model starts from: of a run, of an exported folder, or timm's own."""

from pathlib import Path

import timm
import torch
from torch import Tensor, nn

from dctrain.errors import UserError, told_as
from dctrain.initial import check_initial, is_of_composition

from .export import load_network
from .swap import fit_weights


def read_initial(source: str, model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """Read weights for a model, and the names of those that are drawn anew.

    Position embeddings and patches are resampled to the model's sizes, as timm does. The head is drawn anew where the
    classes are others in number, and composition where there was none.

    Args:
        source: A checkpoint or run of `dcvision`, a folder that `export` wrote, or a timm name with pretrained weights.
        model: A timm model.

    Raises:
        UserError: If there are no weights, or they do not fit.
    """
    network = _load(source)
    _compare_heads(source, network, model)
    name = str(getattr(model, "pretrained_cfg", {}).get("architecture", ""))
    with told_as(f"init={source} does not fit the model"):
        weights = fit_weights(dict(network.state_dict()), model, name)
    head = _head(model)
    ours = model.state_dict()
    others = [key for key in head if key in weights and key in ours and weights[key].shape != ours[key].shape]
    kept = {key: weight for key, weight in weights.items() if not others or key not in head}
    return kept, check_initial(source, kept, model, lambda key: is_of_composition(key) or key in head)


def _compare_heads(source: str, network: nn.Module, model: nn.Module) -> None:
    """Refuse weights of attention with another number of heads, which have the same shapes."""
    theirs = {name: module.num_heads for name, module in network.named_modules() if hasattr(module, "num_heads")}
    for name, module in model.named_modules():
        if name in theirs and getattr(module, "num_heads", theirs[name]) != theirs[name]:
            raise UserError(f"init={source} has {theirs[name]} heads in {name}; the model has {module.num_heads}.")


def _head(model: nn.Module) -> set[str]:
    """Name the parameters of the classifier."""
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    if not isinstance(classifier, nn.Module):
        return set()
    owned = {id(parameter) for parameter in classifier.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in owned}


def _load(source: str) -> nn.Module:
    if (Path(source) / "config.json").is_file():
        with told_as(f"init={source} cannot be loaded"):
            return timm.create_model(f"local-dir:{source}", pretrained=True)
    if Path(source).exists():
        return load_network(source)[0]
    if not timm.is_model(source) and not source.startswith("hf-hub:"):
        raise UserError(
            f"init={source} is neither a file or folder nor a model of timm's; accepted: a checkpoint or run of "
            "dcvision, an exported folder, a timm name with pretrained weights."
        )
    with told_as(f"init={source} has no pretrained weights that can be loaded"), torch.no_grad():
        return timm.create_model(source, pretrained=True)
