"""The built-in data set: scikit-learn's handwritten digits, written once as PNG shards to the cache folder."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torchvision.io import encode_png
from webdataset import TarWriter

from dcmha.cache_dirs import cache_dir
from dctrain.utils.files import atomic_write

NUM_SHARDS = {"train": 8, "val": 4}
NUM_VALIDATION = 360


def digit_shards(split: str) -> str:
    """Return the brace pattern of the shards of one split, "train" (1437 digits) or "val" (360)."""
    folder = cache_dir() / "digits-v1"
    if not folder.is_dir():
        _write_all(folder)
    return f"{folder}/{split}-{{0..{NUM_SHARDS[split] - 1}}}.tar"


def _write_all(folder: Path) -> None:
    """Write both splits to a temporary folder, and rename it atomically."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    splits = {"train": order[NUM_VALIDATION:], "val": order[:NUM_VALIDATION]}
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        for split, indices in splits.items():
            for number, shard in enumerate(np.array_split(indices, NUM_SHARDS[split])):
                path = Path(made) / "digits" / f"{split}-{number}.tar"
                path.parent.mkdir(exist_ok=True)
                with atomic_write(path) as file, TarWriter(file, mtime=0) as writer:
                    for i in shard:
                        writer.write(_sample(int(i), digits.images[i], int(digits.target[i])))
        with suppress(OSError):  # another process was faster
            os.rename(Path(made) / "digits", folder)


def _sample(index: int, image: np.ndarray, label: int) -> dict:
    pixels = torch.from_numpy(np.round(image * (255 / 16)).astype(np.uint8))[None]
    return {"__key__": f"{index:04d}", "png": encode_png(pixels).numpy().tobytes(), "cls": str(label)}
