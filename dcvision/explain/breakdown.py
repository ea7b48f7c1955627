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
    """Break what composition makes of the attention from one patch to another into its terms, head by head.

    The terms are those of equation 7; with the weights that the two patches bring, and what the heads look at before
    and after (figures 7 and 8). `dcvision visualize` draws the same attention on the image.

    Args:
        checkpoint: A model, as `evaluate` takes it.
        image: An image file, which is prepared as the model was made for.
        layer: Name of the layer, or its number among all attention layers; the one that changes the query's attention
            most if left out.
        composition: "pre" breaks scores, "post" weights.
        query: Which patch looks, counted row by row; the middle one if left out.
        key: Which patch it looks at; the token whose attention changes most if left out.
        out: Folder for breakdown.csv and breakdown.png.
        device: Where to run, such as cuda.

    Raises:
        UserError: If something cannot be read, there is no such layer or patch, the model composes nothing there, or
            its layers attend within windows.
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
    """Break a pair of patches of an image [1, 3, size, size] down; other arguments as of `breakdown`.

    Raises:
        ValueError: If there is no such layer, or none with this composition.
        UserError: If there is no such patch, or layers attend within windows.
    """
    model = network.model
    view = AttentionView(pixels[0], patch_grid(model, pixels.shape[-1]), prefix_tokens(model), query)
    rows, columns = view.grid
    looks = view.prefix + view.query
    layers = find_layer(model, layer, composition)
    chosen, recorded, most = record_pair(
        model, partial(model, pixels), layers, composition, looks, lambda one: view.check({"the layer": one})
    )
    at = most if key is None else view.prefix + find_position("key", key, rows * columns)
    return explain_breakdown(recorded, QueryKeyPair(chosen, composition, looks, at, token_names(view), view.prefix))


def token_names(view: AttentionView) -> list[str]:
    """Call patches by row and column."""
    rows, columns = view.grid
    return [f"prefix {n}" for n in range(view.prefix)] + [f"{r}, {c}" for r in range(rows) for c in range(columns)]
