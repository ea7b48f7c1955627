"""Pictures with what is told of them, and where a word looks when it is told."""

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


def beside(image: Tensor, said: list[str]) -> list[str]:
    """Draw an image, uint8 [3, size, size], in letters, with some lines beside it."""
    grey = image.float().mean(0)
    rows = torch.nn.functional.adaptive_avg_pool2d(grey[None], (grey.shape[0] // 2, grey.shape[1]))[0]
    lines = ["".join(SHADES[int(value) * len(SHADES) // 256] for value in row) for row in rows.tolist()]
    middle = (len(lines) - len(said)) // 2
    return [f"{line}  {said[n - middle] if 0 <= n - middle < len(said) else ''}" for n, line in enumerate(lines)]


def draw_captions(images: Tensor, told: list[str], captions: list[list[str]]) -> Figure:
    """Draw images with what is told of them; where it is none of their captions in red, with one that is."""
    figure = Figure(figsize=(12, 2.4 * -(-len(told) // 4)), layout="constrained")
    cells = figure.subplots(-(-len(told) // 4), 4, squeeze=False).flat
    for axes in cells:
        axes.axis("off")
    for axes, image, caption, known in zip(figure.axes, images, told, captions, strict=False):
        axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
        is_right = caption in known
        said = caption if is_right else f"{caption}\n(is: {known[0]})"
        axes.set_title(said, fontsize=7, color="black" if is_right else "C3", parse_math=False)
    return figure


@torch.no_grad()
def draw_words(
    model: ImageText, image: Tensor, normalised: Tensor, caption: EncodedCaption, tokenizer: Tokenizer
) -> dict[str, Figure]:
    """Draw where each word of a caption looks when it is told: a picture for each layer that looks at the image.

    Args:
        model: A captioner with composed attention, or with plain `DCCrossAttention`.
        image: uint8 [3, size, size].
        normalised: The same as the image tower takes it [3, size, size], on its device.
        caption: What is told of it.
        tokenizer: Of the caption.

    Returns:
        The pictures, by the name of the layer.

    Raises:
        UserError: If the image tower's patches are no square.
    """
    device, one = normalised.device, torch.zeros(1, dtype=torch.long, device=normalised.device)
    ids, targets = (torch.from_numpy(row[: caption.end])[None].to(device) for row in caption[:2])
    layers = [name for name, _ in model.named_modules() if name.endswith(".cross")]
    with record_attention(model, layers) as recorded:
        model(normalised[None], Texts(ids, targets, one + caption.end - 1, one))
    places = [place for place, target in enumerate(targets[0].tolist()) if target >= 0]
    words = [
        END if target == tokenizer.eos_id else tokenizer.decode([target]) for target in targets[0][places].tolist()
    ]
    prefix = prefix_tokens(model.image)
    return {name: _draw_layer(name, call, image, places, words, prefix) for name, call in recorded.items()}


def _draw_layer(
    name: str, recorded: Recorded, image: Tensor, places: list[int], words: Sequence[str], prefix: int
) -> Figure:
    """Draw one layer: the image, and where each head looks, a row for each word; before any composition, and after."""
    maps = {"before composition": recorded.uncomposed_weights, "after": recorded.maps.composed_weights}
    if recorded.pre is None and recorded.post is None:
        maps = {"plain": recorded.maps.weights}
    H, rows = len(recorded.maps.scores[0]), len(words)
    wide, high = 0.45 * H + 1.4, 0.45 * rows + 0.9
    figure = Figure(figsize=(2.4 + wide * len(maps), high), layout="constrained")
    figure.suptitle(f"{name}: where words look when they are told", fontsize=10)
    picture, *blocks = figure.subplots(1, 1 + len(maps), width_ratios=[2.4, *[wide] * len(maps)])
    picture.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
    picture.set_axis_off()
    for axes, (label, weights) in zip(blocks, maps.items(), strict=True):
        looks = _on_grid(weights[0, :, places, prefix:].float().cpu())
        side, limit = looks.shape[-1], float(looks.abs().max())
        drawn = axes.imshow(_tiled(looks).numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit, interpolation="nearest")
        axes.set_facecolor("0.6")
        middle = (side - 1) / 2
        axes.set_xticks([middle + (side + 1) * head for head in range(H)], range(H), fontsize=8)
        axes.set_yticks([middle + (side + 1) * row for row in range(rows)], words, fontsize=8, parse_math=False)
        axes.tick_params(length=0)
        axes.set(xlabel="head")
        axes.set_title(f"{label} (red: positive, blue: negative)", fontsize=8)
        figure.colorbar(drawn, ax=axes)
    return figure


def _tiled(looks: Tensor) -> Tensor:
    """Lay out maps [H, T, side, side] as one, a row for each T and a column for each H, with NaN between them."""
    H, T, side, _ = looks.shape
    framed = torch.nn.functional.pad(looks, (0, 1, 0, 1), value=torch.nan)
    return framed.permute(1, 2, 0, 3).reshape(T * (side + 1), H * (side + 1))[:-1, :-1]


def _on_grid(weights: Tensor) -> Tensor:
    """Put weights of patches [H, T, S] where the patches lie [H, T, side, side]."""
    side = math.isqrt(weights.shape[-1])
    if side**2 != weights.shape[-1]:
        raise UserError(f"the image tower makes {weights.shape[-1]} patches, which are no square that can be drawn.")
    return weights.unflatten(-1, (side, side))
