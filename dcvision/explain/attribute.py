"""`dcvision explain attribute`: which branches, heads and patches a class is owed to, by integrated gradients."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dctrain.checkpoint import make_folder
from dctrain.errors import UserError, told_as
from dctrain.evaluation.run import check_at_least_one
from dctrain.explain.attribution import Attribution, attribute_branches, attribute_heads, integrate
from dctrain.explain.attribution_report import explain_attribution
from dctrain.explain.explanation import Explanation, origin_of, write_explanation
from dctrain.explain.places import check_kinds

from ..evaluation.networks import Network
from ..pictures import patch_grid
from .images import load_with_image

KINDS = ("branches", "heads", "patches")


def attribute(
    checkpoint: str,
    image: str,
    target: str | None = None,
    over: Sequence[str] = KINDS,
    steps: int = 64,
    out: str = "attribution",
    device: str = "cpu",
) -> None:
    """Credit the log-probability of a class to branches of the compositions, to heads, and to patches of the image.

    Integrated gradients (Sundararajan et al., 2017; paper, section 4.3): parts are faded in together, from none to all;
    patches from the colour that is 0 once normalised. Each kind takes two forward passes and `steps` forward and
    backward ones.

    Args:
        checkpoint: A model, as `evaluate` takes it.
        image: An image file, which is prepared as the model was made for.
        target: Name or number of the class; the likeliest one if left out.
        over: What is credited, each by itself: "branches", "heads", "patches".
        steps: Points of the integral; the table tells by how much the credits miss their sum.
        out: Folder for attribution.csv, attribution-sums.csv, attribution.json and attribution.png.
        device: Where to run, such as cuda.

    Raises:
        UserError: If something cannot be read, the model has no such parts, or there is no such class.
    """
    asked = locals().copy()
    check_kinds("over", over, KINDS)
    check_at_least_one(steps=steps)
    network, pixels = load_with_image(checkpoint, image, device)
    with torch.no_grad():
        number = find_class(network, target, network.model(pixels)[0])
    found = attribution_of(network, pixels, number, over, steps)
    write_explanation(
        found._replace(title=f"{found.title} for {Path(image).name}"),
        make_folder(out),
        [origin_of(checkpoint, network.model)],
        asked,
    )


def attribution_of(network: Network, pixels: Tensor, number: int, over: Sequence[str], steps: int) -> Explanation:
    """Credit the log-probability of a class for an image [1, 3, size, size]; other arguments as of `attribute`.

    Raises:
        UserError: If the model has no such parts.
    """
    model = network.model.requires_grad_(False)

    def log_probability(shown: Tensor) -> Tensor:
        return model(shown)[0].log_softmax(-1)[number]

    measures: dict[str, Callable[[], Attribution]] = {
        "branches": lambda: attribute_branches(model, lambda: log_probability(pixels), steps),
        "heads": lambda: attribute_heads(model, lambda: log_probability(pixels), steps),
        "patches": lambda: _attribute_patches(patch_grid(model, pixels.shape[-1]), pixels, log_probability, steps),
    }
    found = []
    for kind in over:
        with told_as(f"over={kind}", ValueError):
            found.append(measures[kind]())
    return explain_attribution(found, f"log-probability of {class_name(network, number)}")


def find_class(network: Network, target: str | None, logits: Tensor) -> int:
    """Find a class by its name or number; the likeliest one if None."""
    if target is None:
        return int(logits.argmax())
    if network.classes and target in network.classes:
        return network.classes.index(target)
    if target.isdecimal() and int(target) < len(logits):
        return int(target)
    names = f", or a name such as {network.classes[0]!r}" if network.classes else ""
    raise UserError(f"target={target!r}; accepted: a class from 0 to {len(logits) - 1}{names}.")


def class_name(network: Network, number: int) -> str:
    """Name a class, by its number if need be."""
    return network.classes[number] if network.classes else f"class {number}"


def _attribute_patches(
    grid: tuple[int, int], pixels: Tensor, compute: Callable[[Tensor], Tensor], steps: int
) -> Attribution:
    """Credit the patches of an image [1, 3, size, size], against the colour that is 0 once normalised."""
    rows, columns = grid

    def faded(factors: Tensor) -> Tensor:
        return compute(pixels * F.interpolate(factors.view(1, 1, rows, columns), pixels.shape[2:]))

    places = [(f"row {row}", f"column {column}") for row in range(rows) for column in range(columns)]
    layers, names = zip(*places, strict=True)
    return integrate("patches", layers, names, faded, pixels.device, steps)
