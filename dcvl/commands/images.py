"""Pictures that a user names, and their embeddings."""

# N images, E embedding width

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import check_regular
from dcvision.data.imagenet import EXTENSIONS

from ..load import LoadedPair


def find_images(named: Sequence[str]) -> list[Path]:
    """List picture files: those that are named, and those below folders, in the order of their names.

    Raises:
        UserError: If something is not there, or there is none.
    """
    found: list[Path] = []
    for path in map(Path, named):
        if not path.exists():
            raise UserError(f"images={path} does not exist; expected picture files, and folders of them.")
        below = (
            sorted(file for file in path.rglob("*") if file.suffix.lower() in EXTENSIONS) if path.is_dir() else [path]
        )
        found += below
    if not found:
        raise UserError(f"images={', '.join(named)} hold no picture; expected {', '.join(sorted(EXTENSIONS))}.")
    return found


def batches(pair: LoadedPair, files: Sequence[Path], batch_size: int) -> Iterator[tuple[list[Path], Tensor]]:
    """Yield picture files and the pictures as the image tower takes them [N, 3, size, size], some at a time.

    Raises:
        UserError: If one cannot be read.
    """
    device = next(pair.model.parameters()).device
    for start in tqdm(range(0, len(files), batch_size), "pictures", unit="batch", leave=False):
        part = list(files[start : start + batch_size])
        pictures = []
        for file in part:
            with as_user_error(f"the picture {file} cannot be read"):
                pictures.append(pair.prepare(check_regular(file).read_bytes()))
        yield part, torch.stack(pictures).to(device)


def check_contrastive(pair: LoadedPair) -> None:
    """Refuse towers whose outputs were never compared.

    Raises:
        UserError: If it is so.
    """
    if pair.model.embed_dim is None:
        raise UserError("the model embeds nothing: it was trained to tell captions alone (model.contrastive null).")


def check_captioner(pair: LoadedPair) -> None:
    """Refuse towers that tell no captions.

    Raises:
        UserError: If it is so.
    """
    if not pair.model.is_captioner:
        raise UserError("the model tells no captions: no layer of its text tower looks at the image.")


@torch.inference_mode()
def embed_image_files(pair: LoadedPair, files: Sequence[Path], batch_size: int) -> Tensor:
    """Embed pictures [N, E], of length 1, on the CPU."""
    check_contrastive(pair)
    model = pair.model
    return torch.cat(
        [model.embed_images(model.encode_images(part)).float().cpu() for _, part in batches(pair, files, batch_size)]
    )


@torch.inference_mode()
def embed_texts(pair: LoadedPair, texts: Sequence[str], batch_size: int) -> Tensor:
    """Embed texts [N, E], of length 1, on the CPU; longer ones than the context are cut, which is said."""
    check_contrastive(pair)
    device, found, num_cut = next(pair.model.parameters()).device, [], 0
    for start in range(0, len(texts), batch_size):
        encoded = [pair.encode(text) for text in texts[start : start + batch_size]]
        num_cut += sum(text.is_cut for text in encoded)
        ids = torch.stack([torch.from_numpy(text.input_ids) for text in encoded]).to(device)
        ends = torch.tensor([text.end for text in encoded], device=device)
        found.append(pair.model.encode_texts(ids, ends).float().cpu())
    if num_cut:
        print(f"{num_cut} of {len(texts)} texts are longer than {pair.encode.context_length} tokens and lose their end")
    return torch.cat(found)
