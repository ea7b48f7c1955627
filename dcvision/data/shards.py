"""Local WebDataset tar shards as a map-style source: members are indexed once, then read by offset.

Samples are defined as in webdataset: consecutive members with the same key, the name up to the first dot after its
folder; the rest, in lower case, is the field name. `SampleFields` selects fields. The index of a shard is cached, and
valid for one version of the file.
"""

import hashlib
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import braceexpand
import numpy as np
from tqdm import tqdm

from dcmha.cache_dirs import cache_dir
from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import atomic_write

from .fields import DEFAULT_FIELDS, SampleFields

INDEX_VERSION = 3
MAX_SHARDS = 10**6  # maximum names of a pattern


class ShardIndex(NamedTuple):
    """Locations of the samples of one shard.

    Attributes:
        keys: Keys of the samples [N].
        offsets: Offsets of the images, in bytes [N].
        sizes: Sizes of the images, in bytes [N].
        others: Result of `SampleFields.index` for each sample [N, numbers].
        stamp: Stamp of the file's version.
    """

    keys: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    others: np.ndarray
    stamp: np.ndarray


def expand_urls(urls: str) -> list[str]:
    """Expand brace patterns (`train-{0000..1023}.tar`, several separated by `::`), or a folder into its `*.tar` files.

    Raises:
        UserError: If braces do not match, or a folder has no shards.
    """
    with as_user_error(f"shards {urls!r}"):
        patterns = (url for part in urls.split("::") for url in braceexpand.braceexpand(part))
        expanded = list(islice(patterns, MAX_SHARDS + 1))
        if len(expanded) > MAX_SHARDS:
            raise UserError(f"shards {urls!r} expand to more than {MAX_SHARDS:,} names.")
    if len(expanded) == 1 and Path(expanded[0]).is_dir():
        folder = Path(expanded[0])
        expanded = sorted(str(path) for path in folder.glob("*.tar"))
        if not expanded:
            raise UserError(f"no shards: the folder {folder} has no *.tar files.")
    return expanded


def is_remote(url: str) -> bool:
    """Whether this URL must be streamed by webdataset."""
    return url.startswith("pipe:") or "://" in url


def class_names(urls: list[str]) -> list[str] | None:
    """Read the class names written by `dcvision shards` next to local shards; None if there are none.

    Raises:
        UserError: If shards of several prefixes number their classes differently.
    """
    paths = {re.sub(r"-\d+\.tar$", "-classes.txt", url) for url in urls if re.search(r"-\d+\.tar$", url)}
    found = {path: Path(path).read_text().splitlines() for path in sorted(paths) if Path(path).is_file()}
    if len({tuple(names) for names in found.values()}) > 1:
        raise UserError(f"shards of one data set have different classes: {', '.join(found)}.")
    return next(iter(found.values()), None)


class ShardSource:
    """Map-style access to the samples of local shards.

    Args:
        urls: Shard files.
        fields: Fields of a sample.

    Raises:
        UserError: If a shard is missing, truncated or malformed.
    """

    def __init__(self, urls: list[str], fields: SampleFields = DEFAULT_FIELDS) -> None:
        missing = [url for url in urls if not Path(url).is_file()]
        if missing:
            raise UserError(f"{len(missing)} of {len(urls)} shards are missing, the first is {missing[0]}.")
        self.urls, self.fields = urls, fields
        self.classes = class_names(urls)
        self.indices = _load_indices(urls, fields)
        self.shard_sizes = [len(index.keys) for index in self.indices]
        self.starts = np.concatenate([[0], np.cumsum(self.shard_sizes)])
        if not len(self):
            raise UserError(f"no samples in {len(urls)} shards, the first is {urls[0]}.")

    def __len__(self) -> int:
        return int(self.starts[-1])

    def _locate(self, index: int) -> tuple[int, int]:
        shard = int(np.searchsorted(self.starts, index, side="right")) - 1
        return shard, index - int(self.starts[shard])

    def name(self, index: int) -> str:
        """Name of a sample for messages and predictions."""
        shard, i = self._locate(index)
        return f"{self.urls[shard]}/{self.indices[shard].keys[i]}"

    def labels(self) -> np.ndarray:
        """Return all class numbers, int64."""
        return np.concatenate([index.others[:, 0] for index in self.indices])

    def read(self, index: int) -> tuple[bytes, object]:
        """Return the encoded image of a sample and its other field, such as the class number.

        Raises:
            UserError: If the shard has changed since it was indexed, or is invalid.
        """
        shard, i = self._locate(index)
        found = self.indices[shard]
        with open(self.urls[shard], "rb") as file:
            if not np.array_equal(_stamp(os.fstat(file.fileno()))[:3], found.stamp[:3]):  # not the mode and links
                raise UserError(f"shard {self.urls[shard]} has changed since the run began.")
            file.seek(int(found.offsets[i]))
            image = file.read(int(found.sizes[i]))
            return image, self.fields.read(file, found.others[i].tolist(), self.name(index))


def _stamp(stat: os.stat_result) -> np.ndarray:
    """Identify the version of a file; the last number (ctime) changes with every write and cannot be set."""
    return np.array([stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns], dtype=np.int64)


def _load_indices(urls: list[str], fields: SampleFields) -> list[ShardIndex]:
    """Load the cached indices of all shards; create missing ones, in parallel if there are many."""
    folder = cache_dir() / "shard-index"
    folder.mkdir(exist_ok=True)
    paths = {url: _index_path(folder, url, fields) for url in urls}
    indices = {url: _read_index(path) for url, path in paths.items()}
    todo = [url for url, index in indices.items() if index is None]
    for url, index in zip(todo, _index_shards(todo, fields), strict=True):
        _save_index(paths[url], index)
        indices[url] = index
    return [indices[url] for url in urls]


def _index_shards(urls: list[str], fields: SampleFields) -> Iterator[ShardIndex]:
    if len(urls) <= 8:
        yield from (index_shard(url, fields) for url in urls)
        return
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        indexing = pool.map(index_shard, urls, [fields] * len(urls))
        yield from tqdm(indexing, total=len(urls), desc="indexing shards", unit="shard")


def _index_path(folder: Path, url: str, fields: SampleFields) -> Path:
    """Path of the cached index of the current version of a shard."""
    stamp = ":".join(map(str, _stamp(os.stat(url))))
    identity = f"{INDEX_VERSION}:{Path(url).resolve()}:{stamp}:{fields}"
    return folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"


def _save_index(path: Path, index: ShardIndex) -> None:
    with atomic_write(path) as file:
        np.savez(file, **index._asdict())


def _read_index(path: Path) -> ShardIndex | None:
    """Read a cached index; None if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return ShardIndex(*(arrays[name] for name in ShardIndex._fields))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def index_shard(url: str, fields: SampleFields = DEFAULT_FIELDS) -> ShardIndex:
    """Index a shard: read its headers and class numbers.

    Raises:
        UserError: If the file is compressed, truncated or not a tar file, a key is repeated, or a field is missing or
            ambiguous.
    """
    rows: dict[str, tuple[int, ...]] = {}
    stamp = _stamp(os.stat(url))
    try:
        with tarfile.open(url, "r:") as tar:
            for key, sample in _samples(tar, url):
                if key in rows:
                    raise UserError(f"shard {url} has sample {key} twice.")
                image, _, other = fields.pick(sample, f"{key} of shard {url}")
                rows[key] = (image.offset_data, image.size, *fields.index(tar, other, f"{url}/{other.name}"))
            if stamp[1] < tar.offset + tarfile.BLOCKSIZE:
                raise UserError(f"shard {url} is truncated: its end-of-archive mark is missing.")
    except (tarfile.TarError, EOFError) as error:
        raise UserError(_why_unreadable(url, error)) from error
    if not rows:
        raise UserError(f"shard {url} has no samples: none of its members is named KEY.FIELD.")
    numbers = np.array(list(rows.values()), dtype=np.int64).reshape(len(rows), -1)
    return ShardIndex(np.array(list(rows), dtype=str), numbers[:, 0], numbers[:, 1], numbers[:, 2:], stamp)


def _samples(tar: tarfile.TarFile, url: str) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Group the members of a shard as in webdataset: yield keys, and members by field."""
    key, sample = None, {}
    size = os.path.getsize(url)
    for member in tar:
        if member.isfile() and member.offset_data + member.size > size:
            raise UserError(f"shard {url} is truncated: {member.name} ends beyond the end of the file.")
        split = re.match(r"((?:.*/|)[^.]+)[.]([^/]*)$", member.name)
        if not member.isfile() or split is None or re.match(r"__[^/]*__($|/)", member.name):
            continue
        if split[1] != key:
            if sample:
                yield key, sample
            key, sample = split[1], {}
        if split[2].lower() in sample:
            raise UserError(f"shard {url} has {member.name} twice (a key ends at the first dot).")
        sample[split[2].lower()] = member
    if sample:
        yield key, sample


def _why_unreadable(url: str, error: Exception) -> str:
    with open(url, "rb") as file:
        start = file.read(6)
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return f"shard {url} is compressed; decompress it first, because samples are read by offset."
    return f"shard {url} is truncated or not an uncompressed tar file: {error}."
