"""Reading and embedding image files and texts for commands."""

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
    """Return image files: given files, and files below given folders, sorted by name.

    Raises:
        UserError: If a path does not exist, or there are no images.
    """
    found: list[Path] = []
    for path in map(Path, named):
        if not path.exists():
            raise UserError(f"images={path} does not exist; expected image files, or folders of images.")
        below = (
            sorted(file for file in path.rglob("*") if file.suffix.lower() in EXTENSIONS) if path.is_dir() else [path]
        )
        found += below
    if not found:
        raise UserError(f"images={', '.join(named)} have no images; expected {', '.join(sorted(EXTENSIONS))}.")
    return found


def batches(pair: LoadedPair, files: Sequence[Path], batch_size: int) -> Iterator[tuple[list[Path], Tensor]]:
    """Yield batches of image files and preprocessed images [N, 3, size, size].

    Raises:
        UserError: If an image cannot be read.
    """
    device = next(pair.model.parameters()).device
    for start in tqdm(range(0, len(files), batch_size), "images", unit="batch", leave=False):
        part = list(files[start : start + batch_size])
        images = []
        for file in part:
            with as_user_error(f"cannot read the image {file}"):
                images.append(pair.prepare(check_regular(file).read_bytes()))
        yield part, torch.stack(images).to(device)


def check_contrastive(pair: LoadedPair) -> None:
    """Check that a model was trained with a contrastive loss.

    Raises:
        UserError: If not.
    """
    if pair.model.embed_dim is None:
        raise UserError("the model has no embeddings: it was trained for captions only (model.contrastive null).")


def check_captioner(pair: LoadedPair) -> None:
    """Check that a model is a captioner.

    Raises:
        UserError: If not.
    """
    if not pair.model.is_captioner:
        raise UserError("the model is not a captioner: its text tower has no cross-attention.")


@torch.inference_mode()
def embed_image_files(pair: LoadedPair, files: Sequence[Path], batch_size: int) -> Tensor:
    """Compute normalized image embeddings [N, E], on the CPU."""
    check_contrastive(pair)
    model = pair.model
    return torch.cat(
        [model.embed_images(model.encode_images(part)).float().cpu() for _, part in batches(pair, files, batch_size)]
    )


@torch.inference_mode()
def embed_texts(pair: LoadedPair, texts: Sequence[str], batch_size: int) -> Tensor:
    """Compute normalized text embeddings [N, E], on the CPU; longer texts are truncated, with a message."""
    check_contrastive(pair)
    device, found, num_cut = next(pair.model.parameters()).device, [], 0
    for start in range(0, len(texts), batch_size):
        encoded = [pair.encode(text) for text in texts[start : start + batch_size]]
        num_cut += sum(text.is_cut for text in encoded)
        ids = torch.stack([torch.from_numpy(text.input_ids) for text in encoded]).to(device)
        ends = torch.tensor([text.end for text in encoded], device=device)
        found.append(pair.model.encode_texts(ids, ends).float().cpu())
    if num_cut:
        print(f"{num_cut} of {len(texts)} texts are longer than {pair.encode.context_length} tokens and are truncated")
    return torch.cat(found)
