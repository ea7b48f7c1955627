"""Checks of compatibility between two image models that tensor shapes do not reveal."""

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from dctrain.errors import UserError


def normalization(model: nn.Module) -> dict[str, list[float]]:
    """Return the mean and standard deviation ("mean", "std") per channel of a model's normalization; ImageNet's by
    default.
    """
    cfg = getattr(model, "pretrained_cfg", None) or {}
    defaults = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
    return {name: list(cfg.get(name) or default) for name, default in defaults.items()}


def compare_heads(source: str, network: nn.Module, model: nn.Module) -> None:
    """Compare the number of heads of layers with the same name.

    Args:
        source: Name of the network in messages.
        network: Network whose weights are used.
        model: Model that uses the weights.

    Raises:
        UserError: If the numbers differ.
    """
    theirs = {name: module.num_heads for name, module in network.named_modules() if hasattr(module, "num_heads")}
    for name, module in model.named_modules():
        if name in theirs and getattr(module, "num_heads", theirs[name]) != theirs[name]:
            raise UserError(f"{source} has {theirs[name]} heads in {name}; the model has {module.num_heads}.")


def compare_normalization(source: str, network: nn.Module, model: nn.Module) -> None:
    """Compare the normalization of images; arguments as in `compare_heads`.

    Raises:
        UserError: If the normalization differs.
    """
    wanted, ours = normalization(network), normalization(model)
    if wanted != ours:
        raise UserError(
            f"{source} normalizes images with {_words(wanted)}, the model with {_words(ours)}; expected the same. "
            f"Set model.model_kwargs.pretrained_cfg_overlay={wanted}."
        )


def _words(found: dict[str, list[float]]) -> str:
    return " and ".join(f"{name} {values}" for name, values in found.items())
