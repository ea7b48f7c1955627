"""`dcvl embed`: writes image embeddings."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dctrain.checkpointing.checkpoint import make_folder
from dctrain.errors import UserError
from dctrain.evaluation.run import check_at_least_one
from dctrain.utils.files import atomic_write

from ..load import load_pair
from .images import embed_image_files, find_images


def embed(
    checkpoint: str, images: Sequence[str], out: str = "embeddings.npy", batch_size: int = 64, device: str = "cpu"
) -> None:
    """Write normalized image embeddings, float32 [N, width], and their file names to `OUT.txt`.

    Args:
        checkpoint: A .ckpt file or run of `dcvl fit`, or a folder written by `export`.
        images: Image files, or folders of images.
        out: Output file (.npy).
        batch_size: Images per batch.
        device: Device, such as cuda.
    """
    check_at_least_one(batch_size=batch_size)
    path = Path(out)
    if path.suffix != ".npy":
        raise UserError(f"out={out}; expected a file name that ends in .npy.")
    files, pair = find_images(images), load_pair(checkpoint, device)
    make_folder(str(path.parent))
    found = embed_image_files(pair, files, batch_size).numpy()
    with atomic_write(path) as file:
        np.save(file, found)
    names = Path(f"{path}.txt")
    with atomic_write(names) as file:
        file.write("".join(f"{name}\n" for name in files).encode())
    print(f"{path}: {found.shape[0]} x {found.shape[1]}; names in {names}")
