"""`dcvl classify`: zero-shot classification."""

# N images, K classes, E embedding width

import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.run import check_at_least_one
from dctrain.utils.files import check_regular
from dcvision.data.decode import BadImage
from dcvision.data.sources import Source, open_source

from ..data.captions import TEMPLATE, check_templates, in_template
from ..load import LoadedPair, load_pair
from .images import check_contrastive, embed_texts


def classify(
    checkpoint: str,
    images: str,
    templates: str | None = None,
    classes: str | None = None,
    limit: int | None = None,
    batch_size: int = 64,
    device: str = "cpu",
) -> None:
    """Zero-shot classification of a labeled set by the nearest class embedding; prints accuracy and standard error.

    A class embedding is the mean of the text embeddings of all templates (Radford et al., 2021).

    Args:
        checkpoint: A .ckpt file or run of `dcvl fit`, or a folder written by `export`.
        images: A labeled set in the notation of `dcvision.data.sources`.
        templates: A file of sentences, one per line, each with {} for the class name; default: those of training.
        classes: A file of class names, one per line, in order; default: those of the set.
        limit: Maximum number of images, sampled from the whole set.
        batch_size: Images or texts per batch.
        device: Device, such as cuda.
    """
    check_at_least_one(limit=limit, batch_size=batch_size)
    sentences = None if templates is None else _lines("templates", templates)
    check_templates([TEMPLATE] if sentences is None else sentences)
    source = open_source(images, is_train=False)
    names = _lines("classes", classes) if classes is not None else source.classes
    if not names:
        raise UserError(f"images={images} has no class names; classes is required.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"classes={classes}: {twice!r} is given twice; expected distinct names.")
    if source.classes and len(names) != len(source.classes):
        raise UserError(f"classes={classes} has {len(names)} classes; images={images} has {len(source.classes)}.")
    if source.labels().max() >= len(names):
        raise UserError(f"the set has class {source.labels().max()}, but there are {len(names)} class names.")
    pair = load_pair(checkpoint, device)
    check_contrastive(pair)
    sentences = pair.metadata["templates"] if sentences is None else sentences
    texts = [in_template(sentence, name.replace("_", " ")) for name in names for sentence in sentences]
    means = embed_texts(pair, texts, batch_size).unflatten(0, (len(names), -1)).mean(1)
    is_right, lost = _judge(pair, source, F.normalize(means, dim=1), limit, batch_size)
    if not is_right:
        raise UserError(f"{images}: no image can be read.")
    share = sum(is_right) / len(is_right)
    error = math.sqrt(share * (1 - share) / len(is_right))
    unread = f"; skipped {lost} unreadable images" if lost else ""
    print(f"{images}: {100 * share:.2f} ± {100 * error:.2f} % of {len(is_right)} images, {len(names)} classes{unread}")


def _lines(name: str, path: str) -> list[str]:
    with as_user_error(f"cannot read {name}={path}"):
        found = [line.strip() for line in check_regular(Path(path)).read_text(encoding="utf-8").rstrip().splitlines()]
    if not all(found) or not found:
        raise UserError(f"{name}={path} {'has an empty line' if found else 'is empty'}.")
    return found


@torch.inference_mode()
def _judge(
    pair: LoadedPair, source: Source, classes: Tensor, limit: int | None, batch_size: int
) -> tuple[list[bool], int]:
    """Return for each image whether its class [K, E] is the nearest, and the number of unreadable images."""
    model, device = pair.model, next(pair.model.parameters()).device
    labels = source.labels()
    drawn = torch.randperm(len(source), generator=torch.Generator().manual_seed(0))[:limit].tolist()
    is_right: list[bool] = []
    lost = 0
    for start in tqdm(range(0, len(drawn), batch_size), "images", unit="batch", leave=False):
        images, wanted = [], []
        for index in drawn[start : start + batch_size]:
            try:
                images.append(pair.prepare(source.read(index)[0]))
            except (BadImage, OSError):
                lost += 1
                continue
            wanted.append(int(labels[index]))
        if images:
            embedded = model.embed_images(model.encode_images(torch.stack(images).to(device))).float().cpu()
            is_right += ((embedded @ classes.mT).argmax(1) == torch.tensor(wanted)).tolist()
    return is_right, lost
