"""`dcvision explain report`: all explanations of a model for an image, as one HTML page."""

from pathlib import Path

import torch
from torch import Tensor, nn

from dcmha import ComposedAttentionBase
from dcmha.analysis import attention_layers, measure_mixing, record_attention
from dctrain.errors import as_user_error
from dctrain.evaluation.run import check_steps, name_models
from dctrain.explain.attribution import AttributionSettings
from dctrain.explain.diversity import explain_diversity
from dctrain.explain.explanation import Explanation, origin_of
from dctrain.explain.html_report import (
    PageMaps,
    PageSubject,
    check_size,
    model_facts,
    page_path,
    small_maps,
    write_page,
)
from dctrain.explain.mixing_report import explain_mixing
from dctrain.utils.files import relative

from ..attention_plots import AttentionView, patch_grid, prefix_tokens, read_image
from ..evaluation.networks import Classifier
from .attribute import KINDS, attribution_of, find_class
from .breakdown import breakdown_of, token_names
from .images import load_with_image


def report(
    checkpoint: str,
    image: str,
    target: str | None = None,
    out: str = "report.html",
    steps: int = 32,
    device: str = "cpu",
) -> None:
    """Write an HTML page: attention of each head before and after composition, attribution, breakdown, statistics.

    The page is self-contained. The maps of one layer at a time are in memory; in the page they take two bytes per pair
    of tokens and head.

    Args:
        checkpoint: A model, as in `evaluate`; parts about composition are omitted for plain models.
        image: An image file, preprocessed for the model.
        target: Name or number of the class for the attribution; default: the predicted class.
        out: Output file that ends in .html, or a folder for index.html.
        steps: Integration points of the attribution.
        device: Device, such as cuda.

    Raises:
        UserError: If a file cannot be read or written, the class is unknown, the model has too many tokens for a page,
            or its layers attend within windows.
    """
    check_steps(steps)
    network, pixels = load_with_image(checkpoint, image, device)
    model, (name,) = network.model, name_models([checkpoint])
    view = AttentionView(
        read_image(image, pixels.shape[-1]), patch_grid(model, pixels.shape[-1]), prefix_tokens(model), None
    )
    with as_user_error(checkpoint, ValueError):
        heads = sum(layer.num_heads for layer in attention_layers(model).values())
    check_size(heads, view.prefix + view.grid[0] * view.grid[1])
    with torch.no_grad():
        number = find_class(network, target, model(pixels)[0])
    maps = _maps(model, pixels, view)
    found = [*_of_image(network, pixels, view.pixels, number, steps), explain_diversity([(name, model)])]
    shown = PageSubject(token_names(view), view.grid, view.prefix, view.pixels)
    composed = "" if _composing(model) else " Plain attention: the model has no composition."
    missing = [name for name in attention_layers(model) if name not in maps]
    composed += f" Not recorded: {', '.join(missing)}." if missing else ""
    facts = f"{model_facts(origin_of(checkpoint, model), model)}{composed}"
    path = page_path(out)
    write_page(path, f"{name}: {Path(image).name}", facts, shown, maps, found)
    print(relative(path))


def _composing(model: nn.Module) -> list[ComposedAttentionBase]:
    return [
        layer for layer in model.modules() if isinstance(layer, ComposedAttentionBase) and layer.options.is_composed
    ]


@torch.inference_mode()
def _maps(model: nn.Module, pixels: Tensor, view: AttentionView) -> dict[str, PageMaps]:
    """Record all supported layers: self-attention of this project.

    Raises:
        UserError: If a layer attends within windows.
    """
    layers = [name for name, layer in model.named_modules() if isinstance(layer, ComposedAttentionBase)]
    if not layers:
        return {}

    def keep(one) -> PageMaps:
        view.check({"a layer": one})
        return small_maps(one)

    with record_attention(model, layers, keep) as maps:
        model(pixels)
    return maps


def _of_image(network: Classifier, pixels: Tensor, shown: Tensor, number: int, steps: int) -> list[Explanation]:
    """Explain the model for an image; without compositions for plain attention."""
    composing = _composing(network.model)
    if not composing:
        credits = AttributionSettings([kind for kind in KINDS if kind != "branches"], steps)
        return [attribution_of(network, pixels, number, credits, shown)]
    with torch.inference_mode(), measure_mixing(network.model) as meters:
        network.model(pixels)
    composition = "post" if composing[0].options.post_compose else "pre"
    return [
        attribution_of(network, pixels, number, AttributionSettings(KINDS, steps), shown),
        breakdown_of(network, pixels, composition=composition),
        explain_mixing(meters, "compositions over the image's patches"),
    ]
