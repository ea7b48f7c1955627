"""`dcvision explain attribute`: attribution of a class to branches, heads and patches by integrated gradients."""

# B batch

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError
from dctrain.evaluation.run import check_at_least_one, check_steps
from dctrain.explain.attribution import AttributionSettings, PartSet, kinds_of
from dctrain.explain.attribution_report import explain_attribution
from dctrain.explain.explanation import Explanation, origin_of, write_explanation
from dctrain.explain.selectors import check_kinds

from ..attention_plots import patch_grid, read_image
from ..evaluation.images import readable_images
from ..evaluation.networks import Classifier
from .images import load_on, load_with_image

KINDS = ("branches", "heads", "patches")


def attribute(
    checkpoint: str,
    image: str | None = None,
    target: str | None = None,
    images: str | None = None,
    over: Sequence[str] = (),
    alone: bool = False,
    steps: int = 64,
    limit: int = 256,
    out: str = "attribution",
    batch_size: int = 32,
    device: str = "cpu",
) -> None:
    """Attribute the log-probability of a class to branches of the compositions, to heads, and to patches of the image.

    Integrated gradients (Sundararajan et al., 2017; paper, section 4.3): all parts are scaled together from 0 to 1;
    patches from the color that is 0 after normalization. The scalar is the log-probability of a class for one image,
    or the mean log-probability of the labels for many images. Each kind needs two forward passes, and `steps` forward
    and backward passes.

    Args:
        checkpoint: A model, as in `evaluate`.
        image: An image file, preprocessed for the model.
        target: Name or number of the image's class; default: the predicted class.
        images: An image set, as in `evaluate`, in place of one image.
        over: Kinds of parts, attributed separately: "branches", "heads", and for one image "patches". Default: all.
        alone: Also disable each part separately, one forward pass each, and report the rank correlation.
        steps: Integration points; the integration error is reported.
        limit: Maximum number of images, sampled from the whole set.
        out: Folder for attribution.csv, attribution-sums.csv, attribution.json and attribution.png.
        batch_size: Images per batch.
        device: Device, such as cuda.

    Raises:
        UserError: If an input cannot be read, the model has no such parts, the class is unknown, or not exactly one of
            image and images is given.
    """
    asked = locals().copy()
    if (image is None) == (images is None):
        raise UserError(
            f"{'no image is' if image is None else 'image and images are both'} given; expected one of them."
        )
    if images is not None and target is not None:
        raise UserError(f"target={target!r} requires image; for images the labels are the targets.")
    kinds = KINDS if images is None else KINDS[:2]
    if over:
        check_kinds("over", over, kinds)
    check_steps(steps)
    check_at_least_one(limit=limit, batch_size=batch_size)
    folder = make_folder(out)
    if image is not None:
        network, pixels = load_with_image(checkpoint, image, device)
        credits = AttributionSettings(over or kinds_of(network.model, kinds), steps, alone)
        with torch.no_grad():
            number = find_class(network, target, network.model(pixels)[0])
        found = attribution_of(network, pixels, number, credits, read_image(image, pixels.shape[-1]))
        found = found._replace(title=f"{found.title} for {Path(image).name}")
    else:
        network = load_on(checkpoint, device)
        credits = AttributionSettings(over or kinds_of(network.model, kinds), steps, alone)
        found = _mean_attribution(network, images, credits, limit, batch_size)
    write_explanation(found, folder, [origin_of(checkpoint, network.model)], asked)


def attribution_of(
    network: Classifier, pixels: Tensor, number: int, credits: AttributionSettings, shown: Tensor
) -> Explanation:
    """Attribute the log-probability of a class, given by its number, for an image [1, 3, size, size].

    Attributions to patches are plotted over `shown`, the image as uint8 [3, height, width].

    Raises:
        UserError: If the model has no such parts.
    """
    model, label = network.model.requires_grad_(False), torch.tensor([number], device=pixels.device)
    objective = partial(_mean_log_probability, model, pixels, label)
    makers = {"patches": partial(_patch_parts, model, pixels.shape[-1])}
    found = credits.attribute(model, [objective], makers)
    title = f"log-probability of {class_name(network, number)}"
    return explain_attribution(found, title, shown.permute(1, 2, 0).numpy())


def find_class(network: Classifier, target: str | None, logits: Tensor) -> int:
    """Return a class given its name or number; the predicted class if None."""
    if target is None:
        return int(logits.argmax())
    if network.classes and target in network.classes:
        return network.classes.index(target)
    if target.isdecimal() and int(target) < len(logits):
        return int(target)
    names = f", or a name such as {network.classes[0]!r}" if network.classes else ""
    raise UserError(f"target={target!r}; expected a class from 0 to {len(logits) - 1}{names}.")


def class_name(network: Classifier, number: int) -> str:
    """Name of a class, or its number if unknown."""
    return network.classes[number] if network.classes else f"class {number}"


def _mean_attribution(
    network: Classifier, images: str, credits: AttributionSettings, limit: int, batch_size: int
) -> Explanation:
    """Attribute the mean log-probability of the labels; one batch at a time is on the device."""
    model = network.model.requires_grad_(False)
    device = next(model.parameters()).device
    found = list(readable_images(network, images, limit))

    def objective(batch: list[tuple[int, Tensor]]) -> Tensor:
        labels, pixels = zip(*batch, strict=True)
        mean = _mean_log_probability(model, torch.stack(pixels).to(device), torch.tensor(labels, device=device))
        return mean * (len(batch) / len(found))

    rest = iter(found)
    objectives = [partial(objective, batch) for batch in iter(lambda: list(islice(rest, batch_size)), [])]
    what = f"mean log-probability of the labels of {len(found)} images of {images}"
    return explain_attribution(credits.attribute(model, objectives, {}), what)


def _mean_log_probability(model: nn.Module, pixels: Tensor, labels: Tensor) -> Tensor:
    """Mean log-probability of one class per image [B] for images [B, 3, size, size]."""
    return -F.cross_entropy(model(pixels).float(), labels)


def _patch_parts(model: nn.Module, size: int) -> PartSet:
    """Return the patches of an image, scaled from the color that is 0 after normalization."""
    rows, columns = patch_grid(model, size)

    @contextmanager
    def scaled(factors: Tensor) -> Iterator[None]:
        def fade(_module, args):
            (pixels,) = args
            return (pixels * F.interpolate(factors.view(1, 1, rows, columns), pixels.shape[2:]),)

        hook = model.register_forward_pre_hook(fade)
        try:
            yield
        finally:
            hook.remove()

    places = [(f"row {row}", f"column {column}") for row in range(rows) for column in range(columns)]
    layers, names = zip(*places, strict=True)
    return PartSet("patches", layers, names, scaled)
