"""`dcvision explain breakdown`: the composition of one pair of patches, term by term (figures 7 and 8)."""

from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import as_user_error
from dctrain.explain.breakdown_report import QueryKeyPair, explain_breakdown, record_pair
from dctrain.explain.explanation import Explanation, origin_of, write_explanation
from dctrain.explain.selectors import find_layer, find_position

from ..attention_plots import AttentionView, patch_grid, prefix_tokens
from ..evaluation.networks import Classifier
from .images import load_with_image


def breakdown(
    checkpoint: str,
    image: str,
    layer: str | None = None,
    composition: Literal["pre", "post"] = "post",
    query: int | None = None,
    key: int | None = None,
    out: str = "breakdown",
    device: str = "cpu",
) -> None:
    """Break the composition of the attention from one patch to another into its terms, per head.

    Reports the terms of equation 7, the compose weights of the two patches, and the attention of the heads before and
    after composition (figures 7 and 8). `dcvision visualize` plots the same attention on the image.

    Args:
        checkpoint: A model, as in `evaluate`.
        image: An image file, preprocessed for the model.
        layer: Name of the layer, or its index among all attention layers; default: the layer that changes the query's
            attention most.
        composition: "pre" for scores, "post" for attention weights.
        query: Index of the query patch, row by row; default: the middle one.
        key: Index of the key patch; default: the token whose attention changes most.
        out: Folder for breakdown.csv and breakdown.png.
        device: Device, such as cuda.

    Raises:
        UserError: If an input cannot be read, the layer or patch does not exist, the composition is disabled, or layers
            attend within windows.
    """
    asked = locals().copy()
    folder = make_folder(out)
    network, pixels = load_with_image(checkpoint, image, device)
    with as_user_error(checkpoint, ValueError):
        found = breakdown_of(network, pixels, layer, composition, query, key)
    write_explanation(found, folder, [origin_of(checkpoint, network.model)], asked)


@torch.inference_mode()
def breakdown_of(
    network: Classifier,
    pixels: Tensor,
    layer: str | None = None,
    composition: str = "post",
    query: int | None = None,
    key: int | None = None,
) -> Explanation:
    """Break down a pair of patches of an image [1, 3, size, size]; other arguments as in `breakdown`.

    Raises:
        ValueError: If the layer does not exist or has no such composition.
        UserError: If the patch does not exist, or layers attend within windows.
    """
    model = network.model
    view = AttentionView(pixels[0], patch_grid(model, pixels.shape[-1]), prefix_tokens(model), query)
    rows, columns = view.grid
    query_token = view.prefix + view.query
    layers = find_layer(model, layer, composition)
    chosen, recorded, most = record_pair(
        model, partial(model, pixels), layers, composition, query_token, lambda one: view.check({"the layer": one})
    )
    at = most if key is None else view.prefix + find_position("key", key, rows * columns)
    return explain_breakdown(
        recorded, QueryKeyPair(chosen, composition, query_token, at, token_names(view), view.prefix)
    )


def token_names(view: AttentionView) -> list[str]:
    """Name patches by row and column."""
    rows, columns = view.grid
    return [f"prefix {n}" for n in range(view.prefix)] + [f"{r}, {c}" for r in range(rows) for c in range(columns)]
