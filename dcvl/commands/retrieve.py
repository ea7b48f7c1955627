"""`dcvl retrieve`: finds the pictures nearest to texts, or the texts nearest to pictures."""

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
    """Find for each text the pictures that are nearest to it, with the cosines of their embeddings.

    Args:
        checkpoint: A .ckpt file or run of `dcvl fit`, or a folder that `export` wrote.
        images: Picture files, and folders of them.
        text: Texts.
        texts: A file of texts, one a line, in place of `text`.
        by_image: Find for each picture the texts that are nearest to it.
        top: How many are told of each.
        batch_size: Pictures or texts embedded together.
        device: Where to run, such as cuda.
    """
    check_at_least_one(top=top, batch_size=batch_size)
    wanted, files = _read_texts(text, texts), find_images(images)
    pair = load_pair(checkpoint, device)
    cosines = embed_texts(pair, wanted, batch_size) @ embed_image_files(pair, files, batch_size).mT
    names = [str(file) for file in files]
    for line in _told(cosines.mT, names, wanted, top) if by_image else _told(cosines, wanted, names, top):
        print(line)


def _read_texts(text: Sequence[str], path: str | None) -> list[str]:
    if (path is None) == (not text):
        raise UserError("text and texts: accepted: one of the two, texts or a file of them.")
    found = list(text)
    if path is not None:
        with as_user_error(f"texts={path} cannot be read"):
            found = check_regular(Path(path)).read_text(encoding="utf-8").splitlines()
    found = [line.strip() for line in found if line.strip()]
    if not found:
        raise UserError(f"{'text' if path is None else f'texts={path}'} holds no text.")
    return found


def _told(cosines: Tensor, queries: Sequence[str], keys: Sequence[str], top: int) -> list[str]:
    """Write a query and, indented, what is nearest to it."""
    lines = []
    best = cosines.topk(min(top, len(keys)), dim=1)
    for query, values, places in zip(queries, best.values.tolist(), best.indices.tolist(), strict=True):
        lines += [query, *(f"    {value:+.3f}  {keys[place]}" for value, place in zip(values, places, strict=True))]
    return lines
