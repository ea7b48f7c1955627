"""WebDataset tar shards on local disks as a map-style source: members are indexed once, then read by offset.

Samples are what webdataset makes of a shard: members that follow each other and share a key, the name up to the first
dot behind its folder; the rest, in small letters, names the field. `Fields` says which are the image and the class
number in text. The index of a shard is cached; it belongs to the file as it was then.
"""

import hashlib
import os
import re
import tarfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import braceexpand
import numpy as np
from tqdm import tqdm

from dcmha.folders import cache_dir
from dctrain.errors import UserError, told_as
from dctrain.files import written_whole

INDEX_VERSION = 2


@dataclass(frozen=True)
class Fields:
    """Which fields of a sample are its image and its class number; of alternatives, parted by ";", one must be there.

    Attributes:
        image: The encoded image.
        label: The class number in text.

    Raises:
        UserError: If a field has no name.
    """

    image: str = "jpg;jpeg;png;webp;bmp;ppm;tif;tiff"
    label: str = "cls"

    def __post_init__(self) -> None:
        """Check the names."""
        for name in ("image", "label"):
            if not all(getattr(self, name).split(";")):
                raise UserError(f"fields.{name}={getattr(self, name)!r} must name a field, such as jpg or input.jpg.")

    def pick(self, sample: dict[str, object], name: str) -> tuple[object, object]:
        """Return the image and the label of a sample.

        Args:
            sample: Its fields.
            name: What it is called in messages.

        Raises:
            UserError: If there is not one of each.
        """
        return tuple(_pick(sample, wanted, name) for wanted in (self.image, self.label))


USUAL = Fields()


def _pick(sample: dict[str, object], wanted: str, name: str) -> object:
    found = [field for field in wanted.split(";") if field in sample]
    if len(found) != 1:
        raise UserError(
            f"sample {name} has {len(found)} of the fields {wanted}; accepted: one. It has {', '.join(sample)} "
            "(a key ends at the first dot; data.fields names others)."
        )
    return sample[found[0]]


class ShardIndex(NamedTuple):
    """Where the images of one shard lie: `keys`, `offsets` and `sizes` in bytes, `labels`; and the file's `stamp`."""

    keys: np.ndarray
    offsets: np.ndarray
    sizes: np.ndarray
    labels: np.ndarray
    stamp: np.ndarray


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


def class_names(urls: list[str]) -> list[str] | None:
    """Read the class names that `dcvision shards` writes beside local shards; None if there are none.

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
        fields: Which fields of a sample are taken.

    Raises:
        UserError: If a shard is missing, truncated or malformed.
    """

    def __init__(self, urls: list[str], fields: Fields = USUAL) -> None:
        missing = [url for url in urls if not Path(url).is_file()]
        if missing:
            raise UserError(f"{len(missing)} of {len(urls)} shards are missing, the first is {missing[0]}.")
        self.urls = urls
        self.classes = class_names(urls)
        self.indices = _load_indices(urls, fields)
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
        """Return the encoded image and the label of one sample.

        Raises:
            UserError: If the shard has changed since it was indexed.
        """
        shard, i = self._locate(index)
        found = self.indices[shard]
        with open(self.urls[shard], "rb") as file:
            if not np.array_equal(_stamp(os.fstat(file.fileno()))[:3], found.stamp[:3]):  # modes and links may change
                raise UserError(f"shard {self.urls[shard]} has changed since the run began.")
            file.seek(int(found.offsets[i]))
            return file.read(int(found.sizes[i])), int(found.labels[i])


def _stamp(stat: os.stat_result) -> np.ndarray:
    """Tell one state of a file from every other; the last of these changes with every write, and cannot be set."""
    return np.array([stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns], dtype=np.int64)


def _load_indices(urls: list[str], fields: Fields) -> list[ShardIndex]:
    """Load the cached index of every shard, making those that are missing, in parallel where there are many."""
    folder = cache_dir() / "shard-index"
    folder.mkdir(exist_ok=True)
    paths = {url: _index_path(folder, url, fields) for url in urls}
    indices = {url: _read_index(path) for url, path in paths.items()}
    todo = [url for url, index in indices.items() if index is None]
    for url, index in zip(todo, _index_shards(todo, fields), strict=True):
        _save_index(paths[url], index)
        indices[url] = index
    return [indices[url] for url in urls]


def _index_shards(urls: list[str], fields: Fields) -> Iterator[ShardIndex]:
    if len(urls) <= 8:
        yield from (index_shard(url, fields) for url in urls)
        return
    with ProcessPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        indexing = pool.map(index_shard, urls, [fields] * len(urls))
        yield from tqdm(indexing, total=len(urls), desc="indexing shards", unit="shard")


def _index_path(folder: Path, url: str, fields: Fields) -> Path:
    """Name the cached index of a shard, as it is now."""
    stamp = ":".join(map(str, _stamp(os.stat(url))))
    identity = f"{INDEX_VERSION}:{Path(url).resolve()}:{stamp}:{fields}"
    return folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.npz"


def _save_index(path: Path, index: ShardIndex) -> None:
    with written_whole(path) as file:
        np.savez(file, **index._asdict())


def _read_index(path: Path) -> ShardIndex | None:
    """Read a cached index; None if there is none, or a damaged one."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return ShardIndex(*(arrays[name] for name in ShardIndex._fields))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return None


def index_shard(url: str, fields: Fields = USUAL) -> ShardIndex:
    """Read the headers of a shard and its class numbers.

    Raises:
        UserError: If the file is compressed, truncated or no tar, a key comes twice, or a sample lacks its image or its
            class number or has several.
    """
    rows: dict[str, tuple[int, int, int]] = {}
    stamp = _stamp(os.stat(url))
    try:
        with tarfile.open(url, "r:") as tar:
            for key, sample in _samples(tar, url):
                if key in rows:
                    raise UserError(f"shard {url} holds sample {key} twice.")
                image, label = fields.pick(sample, f"{key} of shard {url}")
                number = parse_label(tar.extractfile(label).read(), f"{url}/{label.name}")
                rows[key] = (image.offset_data, image.size, number)
            if stamp[1] < tar.offset + tarfile.BLOCKSIZE:
                raise UserError(f"shard {url} is truncated: its end-of-archive mark is missing.")
    except (tarfile.TarError, EOFError) as error:
        raise UserError(_why_unreadable(url, error)) from error
    offsets, sizes, labels = np.array(list(rows.values()), dtype=np.int64).reshape(-1, 3).T
    return ShardIndex(np.array(list(rows), dtype=str), offsets, sizes, labels, stamp)


def _samples(tar: tarfile.TarFile, url: str) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Group the members of a shard as webdataset does: yield keys, and members by field."""
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
            raise UserError(f"shard {url} holds {member.name} twice (a key ends at the first dot).")
        sample[split[2].lower()] = member
    if sample:
        yield key, sample


def _why_unreadable(url: str, error: Exception) -> str:
    with open(url, "rb") as file:
        start = file.read(6)
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")):
        return f"shard {url} is compressed; unpack it first: samples are read from their places in it."
    return f"shard {url} is truncated or no uncompressed tar file: {error}."


def parse_label(text: bytes, name: str) -> int:
    """Read a class number.

    Raises:
        UserError: If the text is none.
    """
    if not text.strip().isdigit() or len(text) > 12:
        raise UserError(f"{name} holds {text[:20]!r}; accepted: a class number in text.")
    return int(text)
