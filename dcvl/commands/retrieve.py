"""`dcvl retrieve`: finds the nearest images of texts, or the nearest texts of images."""

# N images, M texts

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from dctrain.errors import UserError, as_user_error
from dctrain.evaluation.run import check_at_least_one
from dctrain.utils.files import check_regular

from ..load import load_pair
from .images import embed_image_files, embed_texts, find_images


def retrieve(
    checkpoint: str,
    images: Sequence[str],
    text: Sequence[str] = (),
    texts: str | None = None,
    by_image: bool = False,
    top: int = 5,
    batch_size: int = 64,
    device: str = "cpu",
) -> None:
    """Print the nearest images of each text, with cosine similarities.

    Args:
        checkpoint: A .ckpt file or run of `dcvl fit`, or a folder written by `export`.
        images: Image files, or folders of images.
        text: Texts.
        texts: A file of texts, one per line, in place of `text`.
        by_image: Print the nearest texts of each image instead.
        top: Number of results per query.
        batch_size: Images or texts per batch.
        device: Device, such as cuda.
    """
    check_at_least_one(top=top, batch_size=batch_size)
    wanted, files = _read_texts(text, texts), find_images(images)
    pair = load_pair(checkpoint, device)
    cosines = embed_texts(pair, wanted, batch_size) @ embed_image_files(pair, files, batch_size).mT
    names = [str(file) for file in files]
    for line in _lines(cosines.mT, names, wanted, top) if by_image else _lines(cosines, wanted, names, top):
        print(line)


def _read_texts(text: Sequence[str], path: str | None) -> list[str]:
    if (path is None) == (not text):
        raise UserError("text and texts: expected one of the two.")
    found = list(text)
    if path is not None:
        with as_user_error(f"cannot read texts={path}"):
            found = check_regular(Path(path)).read_text(encoding="utf-8").splitlines()
    found = [line.strip() for line in found if line.strip()]
    if not found:
        raise UserError(f"{'text' if path is None else f'texts={path}'} has no text.")
    return found


def _lines(cosines: Tensor, queries: Sequence[str], keys: Sequence[str], top: int) -> list[str]:
    """Format a query and, indented, its nearest results."""
    lines = []
    best = cosines.topk(min(top, len(keys)), dim=1)
    for query, values, places in zip(queries, best.values.tolist(), best.indices.tolist(), strict=True):
        lines += [query, *(f"    {value:+.3f}  {keys[place]}" for value, place in zip(values, places, strict=True))]
    return lines
