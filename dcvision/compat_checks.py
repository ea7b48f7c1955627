"""What two image models must have in common for weights to mean the same, and no shape of a tensor tells."""

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import nn

from dctrain.errors import UserError


def normalisation(model: nn.Module) -> dict[str, list[float]]:
    """Tell the mean and the standard deviation ("mean", "std") of each channel that a model's images are scaled by;
    ImageNet's, for a model that does not say.
    """
    cfg = getattr(model, "pretrained_cfg", None) or {}
    defaults = {"mean": IMAGENET_DEFAULT_MEAN, "std": IMAGENET_DEFAULT_STD}
    return {name: list(cfg.get(name) or default) for name, default in defaults.items()}


def compare_heads(source: str, network: nn.Module, model: nn.Module) -> None:
    """Compare the heads of layers of the same name.

    Args:
        source: What the message calls the network.
        network: Whose weights are to be used.
        model: What they are to be used in.

    Raises:
        UserError: If they are not as many.
    """
    theirs = {name: module.num_heads for name, module in network.named_modules() if hasattr(module, "num_heads")}
    for name, module in model.named_modules():
        if name in theirs and getattr(module, "num_heads", theirs[name]) != theirs[name]:
            raise UserError(f"{source} has {theirs[name]} heads in {name}; the model has {module.num_heads}.")


def compare_normalisation(source: str, network: nn.Module, model: nn.Module) -> None:
    """Compare how images are scaled; arguments as of `compare_heads`.

    Raises:
        UserError: If it is not the same.
    """
    wanted, ours = normalisation(network), normalisation(model)
    if wanted != ours:
        raise UserError(
            f"{source} takes images of {_words(wanted)}; the model's are of {_words(ours)}. Accepted: a model that has "
            f"the same; model.model_kwargs.pretrained_cfg_overlay={wanted} says so."
        )


def _words(found: dict[str, list[float]]) -> str:
    return " and ".join(f"{name} {values}" for name, values in found.items())
