"""WebDataset tar shards on local disks as a map-style source: members are indexed once, then read by offset.

A sample is the members that share a key: one image (`.jpg`, `.png`, ...) and one class number in text (`.cls`). The
index of a shard is cached by its path, size and modification time.
"""

import hashlib
import os
import tarfile
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import braceexpand
import numpy as np
from tqdm import tqdm

from dctrain.cache import cache_dir
from dctrain.errors import UserError, told_as

IMAGE_EXTENSIONS = {"jpg", "jpeg", "png", "webp", "bmp", "ppm", "tif", "tiff"}
LABEL_EXTENSION = "cls"


class ShardIndex(NamedTuple):
    """Where the images of one shard lie: `keys`, `offsets` and `sizes` in bytes, `labels`."""

    keys: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray


def expand_urls(urls: str) -> list[str]:
    """Expand brace patterns (`train-{0000..1023}.tar`, several separated by `::`), or a folder into its `*.tar` files.

    Raises:
        UserError: If braces do not match, or a folder holds no shard.
    """
    with told_as(f"shards {urls!r}"):
        expanded = [url for part in urls.split("::") for url in braceexpand.braceexpand(part)]
    if len(expanded) == 1 and Path(expanded[0]).is_dir():
        folder = Path(expanded[0])
        expanded = sorted(str(path) for path in folder.glob("*.tar"))
        if not expanded:
            raise UserError(f"no shard: the folder {folder} holds no *.tar file.")
    return expanded


def is_remote(url: str) -> bool:
    """Tell whether webdataset must stream this URL rather than read a local file."""
    return url.startswith("pipe:") or "://" in url


class ShardSource:
    """Map-style access to the samples of local shards.

    Args:
        urls: Shard files.

    Raises:
        UserError: If a shard is missing, truncated or malformed.
    """

    def __init__(self, urls: list[str]) -> None:
        missing = [url for url in urls if not Path(url).is_file()]
        if missing:
            raise UserError(f"{len(missing)} of {len(urls)} shards are missing, the first is {missing[0]}.")
        self.urls = urls
        self.indices = _load_indices(urls)
        self.shard_sizes = [len(index.keys) for index in self.indices]
        self.starts = np.concatenate([[0], np.cumsum(self.shard_sizes)])
        if not len(self):
            raise UserError(f"no sample in {len(urls)} shards, the first is {urls[0]}.")

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _locate(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.starts, index, side="right")) - 1
        return shard, index - int(self.starts[shard])

    def name(self, index: int) -> str:
        """Name a sample for messages and predictions."""
        shard, i = self._locate(index)
        return f"{self.urls[shard]}/{self.indices[shard].keys[i]}"

    def labels(self) -> np.ndarray:
        """Return all labels, int64."""
        return np.concatenate([index.labels for index in self.indices])

    def read(self, index: int) -> tuple[bytes, int]:
        """Return the encoded image and the label of one sample."""
        shard, i = self._locate(index)
        found = self.indices[shard]
        with open(self.urls[shard], "rb") as file:
            file.seek(int(found.offsets[i]))
            return file.read(int(found.sizes[i])), int(found.labels[i])


def _load_indices(urls: list[str]) -> list[ShardIndex]:
    """Load the cached index of every shard, making those that are missing, in parallel where there are many."""
    folder = cache_dir() / "shard-index"
    folder.mkdir(exist_ok=True)
    todo = [url for url in urls if not _index_path(folder, url).exists()]
    if len(todo) > 8:
        workers = min(8, os.cpu_count() or 1)
        with ProcessPoolExecutor(workers) as pool, tqdm(total=len(todo), desc="indexing shards", unit="shard") as bar:
            for url, index in zip(todo, pool.map(index_shard, todo), strict=True):
                _save_index(_index_path(folder, url), index)
                bar.update()
    else:
        for url in todo:
            _save_index(_index_path(folder, url), index_shard(url))
    return [_read_index(_index_path(folder, url)) for url in urls]


def _index_path(folder: Path, url: str) -> Path:
    stat = os.stat(url)
    identity = f"{Path(url).resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"


def _save_index(path: Path, index: ShardIndex) -> None:
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".tmp", delete=False) as file:
        np.savez(file, **index._asdict())
    os.replace(file.name, path)


def _read_index(path: Path) -> ShardIndex:
    with np.load(path, allow_pickle=False) as arrays:
        return ShardIndex(*(arrays[name] for name in ShardIndex._fields))


def index_shard(url: str) -> ShardIndex:
    """Read the headers of a shard and its class numbers.

    Raises:
        UserError: If the file is compressed, truncated or no tar, or a sample lacks its image or its class number.
    """
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    size = os.path.getsize(url)
    try:
        with tarfile.open(url, "r:") as tar:
            for member in tar:
                if not member.isfile():
                    continue
                if member.offset_data + member.size > size:
                    raise UserError(f"shard {url} is truncated: {member.name} ends beyond the end of the file.")
                folder, _, base = member.name.rpartition("/")
                key, _, extension = base.partition(".")
                key = f"{folder}/{key}" if folder else key
                if extension.lower() in IMAGE_EXTENSIONS:
                    images[key] = (member.offset_data, member.size)
                elif extension == LABEL_EXTENSION:
                    labels[key] = _parse_label(tar.extractfile(member).read(), f"{url}/{member.name}")
            if size < tar.offset + tarfile.BLOCKSIZE:
                raise UserError(f"shard {url} is truncated: its end-of-archive mark is missing.")
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"shard {url} is truncated or no uncompressed tar file: {error}.") from error
    unpaired = images.keys() ^ labels.keys()
    if unpaired:
        key = min(unpaired)
        lacks = f"no class number (.{LABEL_EXTENSION})" if key in images else "no image"
        raise UserError(f"sample {key} of shard {url} has {lacks}; {len(unpaired)} samples are incomplete.")
    keys = list(images)
    positions = np.array([images[key] for key in keys], dtype=np.int64).reshape(-1, 2)
    return ShardIndex(np.array(keys, dtype=str), *positions.T, np.array([labels[key] for key in keys], dtype=np.int64))


def _parse_label(text: bytes, name: str) -> int:
    if not text.strip().isdigit() or len(text) > 12:
        raise UserError(f"{name} holds {text[:20]!r}; accepted: a class number in text.")
    return int(text)
