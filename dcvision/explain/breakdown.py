"""`dcvision explain breakdown`: the composition of one pair of patches, term by term (figures 7 and 8)."""

from pathlib import Path
from typing import Literal

import torch

from dcmha.analysis import Recorded, record_attention
from dctrain.checkpoint import make_folder
from dctrain.errors import told_as
from dctrain.explain.breakdown_report import Pair, explain_breakdown, most_changed
from dctrain.explain.explanation import write_explanation
from dctrain.explain.places import find_layer, find_position

from ..evaluation.networks import load_classifier
from ..pictures import View, patch_grid


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
    and after (figures 7 and 8). `look` draws the same attention on the image.

    Args:
        checkpoint: A model, as `evaluate` takes it.
        image: An image file, which is prepared as the model was made for.
        layer: Name or number of the layer; that which changes the query's attention most if left out.
        composition: "pre" breaks scores, "post" weights.
        query: Which patch looks, counted row by row; the middle one if left out.
        key: Which patch it looks at; the token whose attention changes most if left out.
        out: Folder for breakdown.csv and breakdown.png.
        device: Where to run, such as cuda.

    Raises:
        UserError: If something cannot be read, there is no such layer or patch, the model composes nothing there, or
            its layers attend within windows.
    """
    network = load_classifier(checkpoint)
    with told_as(f"device={device!r} cannot be used"):
        model = network.model.to(device)
    with told_as(f"the image {image} cannot be read"):
        pixels = network.prepare(Path(image).read_bytes())[None].to(device)
    view = View(pixels[0], patch_grid(model, pixels.shape[-1]), getattr(model, "num_prefix_tokens", 0), query)
    rows, columns = view.grid
    words = [f"prefix {n}" for n in range(view.prefix)] + [f"{r}, {c}" for r in range(rows) for c in range(columns)]
    looks = view.prefix + view.query
    with told_as(checkpoint, ValueError):
        layers = find_layer(model, layer, composition)

    def keep(one: Recorded) -> tuple[int, float]:
        view.check({"the layer": one})
        return most_changed(one, composition, looks)

    with torch.inference_mode():
        with record_attention(model, layers, keep) as changes:
            model(pixels)
        chosen = max(changes, key=lambda name: changes[name][1])
        with record_attention(model, [chosen]) as recorded:
            model(pixels)
    at = changes[chosen][0] if key is None else view.prefix + find_position("key", key, rows * columns)
    write_explanation(
        explain_breakdown(recorded[chosen], Pair(chosen, composition, looks, at, words)), make_folder(out)
    )
