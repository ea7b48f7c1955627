"""Initial weights of an image model: from a run, an exported folder, or timm."""

from pathlib import Path

from torch import Tensor, nn

from dctrain.checkpointing.init_from import check_initial, is_of_composition
from dctrain.errors import as_user_error

from .compat_checks import compare_heads, compare_normalization
from .export import load_network
from .pretrained import is_exported, load_pretrained
from .swap import fit_weights


def read_initial(source: str, model: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
    """Read initial weights for a model, and the names of parameters that keep their random initialization.

    Position embeddings and patch embeddings are resampled to the model's sizes, as in timm. The head keeps its random
    initialization if the number of classes differs, and compose weights if the source has none.

    Args:
        source: A checkpoint or run of `dcvision`, a folder written by `export`, or a timm name with pretrained weights.
        model: A timm model.

    Raises:
        UserError: If there are no weights, or they do not match.
    """
    is_run = Path(source).exists() and not is_exported(source)
    network = load_network(source)[0] if is_run else load_pretrained(source)
    compare_heads(f"init={source}", network, model)
    name = str(getattr(model, "pretrained_cfg", {}).get("architecture", ""))
    with as_user_error(f"init={source} does not match the model"):
        weights = fit_weights(dict(network.state_dict()), model, name)
    head = _head(model)
    ours = model.state_dict()
    others = [key for key in head if key in weights and key in ours and weights[key].shape != ours[key].shape]
    unused = head if others else _head(network) - set(ours)
    kept = {key: weight for key, weight in weights.items() if key not in unused}
    missing = check_initial(source, kept, model, lambda key: is_of_composition(key) or key in head)
    compare_normalization(f"init={source}", network, model)
    return kept, missing


def _head(model: nn.Module) -> set[str]:
    """Names of the classifier's parameters."""
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    if not isinstance(classifier, nn.Module):
        return set()
    owned = {id(parameter) for parameter in classifier.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in owned}
