"""Figures of images with generated captions, and of the cross-attention of words."""

# H heads, T tokens, S patches

import math
from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from dclm.data.tokenizers import Tokenizer
from dcmha.analysis import Recorded, record_attention
from dctrain.errors import UserError
from dcvision.attention_plots import prefix_tokens

from .data.samples import EncodedCaption
from .network import ImageText, Texts

SHADES = " .:-=+*#%@"
END = "(end)"


def beside(image: Tensor, words: list[str]) -> list[str]:
    """Render an image, uint8 [3, size, size], as text, with lines of text next to it."""
    gray = image.float().mean(0)
    rows = torch.nn.functional.adaptive_avg_pool2d(gray[None], (gray.shape[0] // 2, gray.shape[1]))[0]
    lines = ["".join(SHADES[int(value) * len(SHADES) // 256] for value in row) for row in rows.tolist()]
    middle = (len(lines) - len(words)) // 2
    return [f"{line}  {words[n - middle] if 0 <= n - middle < len(words) else ''}" for n, line in enumerate(lines)]


def draw_captions(images: Tensor, generated: list[str], captions: list[list[str]]) -> Figure:
    """Plot images with generated captions; wrong ones are red, with a reference caption."""
    figure = Figure(figsize=(12, 2.4 * -(-len(generated) // 4)), layout="constrained")
    cells = figure.subplots(-(-len(generated) // 4), 4, squeeze=False).flat
    for axes in cells:
        axes.axis("off")
    for axes, image, caption, known in zip(figure.axes, images, generated, captions, strict=False):
        axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
        is_right = caption in known
        title = caption if is_right else f"{caption}\n(is: {known[0]})"
        axes.set_title(title, fontsize=7, color="black" if is_right else "C3", parse_math=False)
    return figure


@torch.no_grad()
def draw_words(
    model: ImageText, image: Tensor, normalized: Tensor, caption: EncodedCaption, tokenizer: Tokenizer
) -> dict[str, Figure]:
    """Plot the cross-attention of each word of a caption: one figure per layer with cross-attention.

    Args:
        model: A captioner with composed attention, or with plain `DCCrossAttention`.
        image: uint8 [3, size, size].
        normalized: The normalized image [3, size, size], on the image tower's device.
        caption: Caption of the image.
        tokenizer: Tokenizer of the caption.

    Returns:
        Figures by layer name.

    Raises:
        UserError: If the image tower's patches do not form a square.
    """
    device, one = normalized.device, torch.zeros(1, dtype=torch.long, device=normalized.device)
    ids, targets = (torch.from_numpy(row[: caption.end])[None].to(device) for row in caption[:2])
    layers = [name for name, _ in model.named_modules() if name.endswith(".cross")]
    with record_attention(model, layers) as recorded:
        model(normalized[None], Texts(ids, targets, one + caption.end - 1, one))
    places = [place for place, target in enumerate(targets[0].tolist()) if target >= 0]
    words = [
        END if target == tokenizer.eos_id else tokenizer.decode([target]) for target in targets[0][places].tolist()
    ]
    prefix = prefix_tokens(model.image)
    return {name: _draw_layer(name, call, image, places, words, prefix) for name, call in recorded.items()}


def _draw_layer(
    name: str, recorded: Recorded, image: Tensor, places: list[int], words: Sequence[str], prefix: int
) -> Figure:
    """Plot one layer: the image, and the attention of each head without and with composition, one row per word."""
    maps = {"before composition": recorded.uncomposed_weights, "after": recorded.maps.composed_weights}
    if recorded.pre is None and recorded.post is None:
        maps = {"plain": recorded.maps.weights}
    H, rows = len(recorded.maps.scores[0]), len(words)
    wide, high = 0.45 * H + 1.4, 0.45 * rows + 0.9
    figure = Figure(figsize=(2.4 + wide * len(maps), high), layout="constrained")
    figure.suptitle(f"{name}: cross-attention of generated words", fontsize=10)
    picture, *blocks = figure.subplots(1, 1 + len(maps), width_ratios=[2.4, *[wide] * len(maps)])
    picture.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
    picture.set_axis_off()
    for axes, (label, weights) in zip(blocks, maps.items(), strict=True):
        grids = _on_grid(weights[0, :, places, prefix:].float().cpu())
        side, limit = grids.shape[-1], float(grids.abs().max())
        drawn = axes.imshow(_tiled(grids).numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        axes.set_facecolor("0.6")
        middle = (side - 1) / 2
        axes.set_xticks([middle + (side + 1) * head for head in range(H)], range(H), fontsize=8)
        axes.set_yticks([middle + (side + 1) * row for row in range(rows)], words, fontsize=8, parse_math=False)
        axes.tick_params(length=0)
        axes.set(xlabel="head")
        axes.set_title(f"{label} (red: positive, blue: negative)", fontsize=8)
        figure.colorbar(drawn, ax=axes)
    return figure


def _tiled(grids: Tensor) -> Tensor:
    """Tile maps [H, T, side, side] to one map, with rows T and columns H, separated by NaN."""
    H, T, side, _ = grids.shape
    framed = torch.nn.functional.pad(grids, (0, 1, 0, 1), value=torch.nan)
    return framed.permute(1, 2, 0, 3).reshape(T * (side + 1), H * (side + 1))[:-1, :-1]


def _on_grid(weights: Tensor) -> Tensor:
    """Arrange weights of patches [H, T, S] on the grid of patches [H, T, side, side]."""
    side = math.isqrt(weights.shape[-1])
    if side**2 != weights.shape[-1]:
        raise UserError(f"the image tower has {weights.shape[-1]} patches; expected a square number.")
    return weights.unflatten(-1, (side, side))
