"""Sources of images: the notation of data sets, and map-style access.

- `digits`: the built-in handwritten digits
- `shards:PATTERN`: WebDataset tar shards, local or remote
- `folder:DIR`: one folder of images per class, classes numbered in sorted order
- `torchvision:NAME:DIR`: a torchvision data set by its class name, downloaded to DIR if possible
"""

import inspect
from pathlib import Path
from typing import Protocol

import numpy as np
import torchvision
from torch import Tensor
from torchvision.transforms.v2.functional import pil_to_tensor

from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import check_regular

from .digits import digit_shards
from .fields import DEFAULT_FIELDS, SampleFields
from .shards import ShardSource, expand_urls, is_remote

KINDS = ("digits", "shards:PATTERN", "folder:DIR", "torchvision:NAME:DIR")


class Source(Protocol):
    """Random access to samples.

    Attributes:
        shard_sizes: Samples of each shard, for shuffling.
        classes: Names of the classes by number; None if unknown.
    """

    shard_sizes: list[int]
    classes: list[str] | None

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Name of a sample for messages and predictions."""

    def labels(self) -> np.ndarray:
        """Return all labels, int64."""

    def read(self, index: int) -> tuple[bytes | Tensor, int]:
        """Return the encoded image, or the decoded one (uint8 [3, H, W]), and its label."""


class FolderSource:
    """Images in one folder per class.

    Args:
        root: The folder of class folders.

    Raises:
        UserError: If there are no class folders, or one has no images.
    """

    def __init__(self, root: str) -> None:
        if not Path(root).is_dir():
            raise UserError(f"the image folder {root} does not exist.")
        with as_user_error(f"the image folder {root} does not have one folder per class"):
            found = torchvision.datasets.ImageFolder(root)
        self.samples, self.classes = found.samples, found.classes
        self.shard_sizes = [len(self.samples)]

    def __len__(self) -> int:
        return len(self.samples)

    def name(self, index: int) -> str:
        return self.samples[index][0]

    def labels(self) -> np.ndarray:
        return np.array([label for _, label in self.samples], dtype=np.int64)

    def read(self, index: int) -> tuple[bytes, int]:
        path, label = self.samples[index]
        return check_regular(Path(path)).read_bytes(), label


class TorchvisionSource:
    """A torchvision classification data set.

    Args:
        name: Class name in `torchvision.datasets`.
        root: Folder of the data set, also for downloading.
        is_train: Whether to use the training split.

    Raises:
        UserError: If the data set is unknown, has no splits, or is not available.
    """

    def __init__(self, name: str, root: str, is_train: bool) -> None:
        self.dataset = _open_torchvision(name, root, is_train)
        self.classes = [str(name) for name in getattr(self.dataset, "classes", None) or ()] or None
        self.title = f"{name}/{'train' if is_train else 'val'}"
        self.shard_sizes = [len(self.dataset)]

    def __len__(self) -> int:
        return len(self.dataset)

    def name(self, index: int) -> str:
        return f"{self.title}/{index}"

    def labels(self) -> np.ndarray:
        for attribute in ("targets", "labels", "_labels"):
            if hasattr(self.dataset, attribute):
                return np.asarray(getattr(self.dataset, attribute), dtype=np.int64)
        return np.array([self.dataset[i][1] for i in range(len(self))], dtype=np.int64)

    def read(self, index: int) -> tuple[Tensor, int]:
        image, label = self.dataset[index]
        return pil_to_tensor(image.convert("RGB")), int(label)


def _open_torchvision(name: str, root: str, is_train: bool):
    cls = getattr(torchvision.datasets, name, None)
    parameters = inspect.signature(cls).parameters if inspect.isclass(cls) else {}
    if "train" not in parameters and "split" not in parameters:
        raise UserError(
            f"torchvision has no data set {name!r} with train and test splits (such as CIFAR10, Flowers102)."
        )
    download = {"download": True} if "download" in parameters else {}
    splits = [{"train": is_train}]
    if "train" not in parameters:
        splits = [{"split": split} for split in (("train",) if is_train else ("test", "val"))]
    problem = None
    for split in splits:
        try:
            return cls(root, **split, **download)
        except (ValueError, RuntimeError, OSError) as error:
            problem = problem or error
    raise UserError(f"torchvision's {name} was not found in {root} and could not be downloaded: {problem}") from problem


def stream_urls(spec: str) -> list[str] | None:
    """Return the shards of a remote data set; None for a local data set."""
    kind, _, rest = spec.partition(":")
    if kind != "shards" or not rest:
        return None
    urls = expand_urls(rest)
    return urls if any(is_remote(url) for url in urls) else None


def open_source(spec: str, is_train: bool, fields: SampleFields = DEFAULT_FIELDS) -> Source:
    """Open a local data set given in the notation above; `fields` applies to samples of shards.

    Raises:
        UserError: If the notation is unknown, or the data cannot be opened.
    """
    kind, _, rest = spec.partition(":")
    if kind == "digits" and not rest:
        return ShardSource(expand_urls(digit_shards("train" if is_train else "val")))
    if kind == "shards" and rest:
        return ShardSource(expand_urls(rest), fields)
    if kind == "folder" and rest:
        return FolderSource(rest)
    if kind == "torchvision" and rest.count(":") >= 1:
        name, _, root = rest.partition(":")
        return TorchvisionSource(name, root, is_train)
    raise UserError(f"data set {spec!r} is unknown; expected {', '.join(KINDS)}.")
