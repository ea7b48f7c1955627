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
from dcvision.pictures import prefix_tokens

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
    """Draw images with what is told of them, in red where it is not one of their captions."""
    figure = Figure(figsize=(12, 2.4 * -(-len(told) // 4)), layout="constrained")
    cells = figure.subplots(-(-len(told) // 4), 4, squeeze=False).flat
    for axes in cells:
        axes.axis("off")
    for axes, image, caption, known in zip(figure.axes, images, told, captions, strict=False):
        axes.imshow(image.permute(1, 2, 0).numpy(), interpolation="nearest")
        axes.set_title(caption, fontsize=7, color="black" if caption in known else "C3", parse_math=False)
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
    """Draw one layer: a row for each word; per head, where it looks before any composition and after all."""
    maps = {"before composition": recorded.uncomposed_weights, "after": recorded.maps.composed_weights}
    if recorded.pre is None and recorded.post is None:
        maps = {"plain": recorded.maps.weights}
    looks = {label: _on_grid(weights[0, :, places, prefix:].float().cpu()) for label, weights in maps.items()}
    H = len(recorded.maps.scores[0])
    figure = Figure(figsize=(1.6 + 0.8 * H * len(looks), 0.5 + 0.85 * len(words)), layout="constrained")
    figure.suptitle(f"{name}: where each word looks when it is told (red: positive, blue: negative)", fontsize=10)
    cells = figure.subplots(len(words), 1 + H * len(looks), squeeze=False)
    for row, (line, word) in enumerate(zip(cells, words, strict=True)):
        line[0].imshow(image.permute(1, 2, 0).numpy())
        line[0].set_title(word, fontsize=9, parse_math=False)
        for column, (label, head) in enumerate((label, head) for label in looks for head in range(H)):
            cell = line[1 + column]
            limit = float(looks[label].abs().max())
            drawn = cell.imshow(looks[label][head, row].numpy(), cmap="RdBu_r", vmin=-limit, vmax=limit)
            if row == 0:
                cell.set_title(f"{label if head == 0 else ''}\nhead {head}", fontsize=8, loc="left")
            if row == 0 and head == H - 1:
                figure.colorbar(drawn, ax=cells[:, 1 + column].tolist(), shrink=0.5)
        for cell in line:
            cell.set(xticks=[], yticks=[])
    return figure


def _on_grid(weights: Tensor) -> Tensor:
    """Put weights of patches [H, T, S] where the patches lie [H, T, side, side]."""
    side = math.isqrt(weights.shape[-1])
    if side**2 != weights.shape[-1]:
        raise UserError(f"the image tower makes {weights.shape[-1]} patches, which are no square that can be drawn.")
    return weights.unflatten(-1, (side, side))
