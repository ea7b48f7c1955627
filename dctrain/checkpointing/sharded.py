"""Sharded checkpoints: a folder to which each rank writes its shards, by `torch.distributed.checkpoint`.

Tensors are stored with the shape and order of unsharded parameters, so a different mesh, or one process, can read them.
The folder also holds the index of the tensors (`sharded_index`) and `meta.pt`, with everything that is not a tensor of
the model or its optimizer. No file of the folder can run code when it is read.
"""

import io
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult

from ..distributed.layout import ShardBlock
from ..errors import UserError
from ..utils.files import restoring_os_errors
from .sharded_index import INDEX, read_index, write_index

META = "meta.pt"


class LocalShard(NamedTuple):
    """A rank's part of a stored tensor.

    Attributes:
        local: The rank's tensor.
        shape: Shape of the full tensor.
        blocks: Positions of the rank's tensor in the full one.
    """

    local: Tensor
    shape: torch.Size
    blocks: list[ShardBlock]


def as_local_shard(x: Tensor) -> LocalShard:
    """A tensor that is not sharded."""
    start = (0,) * x.dim()
    return LocalShard(x, x.shape, [ShardBlock(start, start, tuple(x.shape))])


def is_sharded(path: Path) -> bool:
    """Whether a path is a sharded checkpoint."""
    return (path / INDEX).is_file()


def write_shards(folder: Path, parts: Mapping[str, LocalShard], group: dist.ProcessGroup | None = None) -> None:
    """Write this rank's shards; called on all ranks of the group.

    Raises:
        OSError: If a rank cannot write.
    """
    planner = _SavePlanner(parts)
    try:
        dcp.save({}, storage_writer=_Writer(folder), planner=planner, process_group=group)
    except dcp.api.CheckpointException as error:
        raise _cause(error, folder) from error


def read_shards(folder: Path, parts: Mapping[str, LocalShard], *, alone: bool = False) -> None:
    """Read into this rank's tensors; called on all ranks, unless `alone`.

    Raises:
        OSError: If a rank cannot read.
        UserError: If the folder is no whole checkpoint.
    """
    stored = [entry for item, entry in read_index(folder).storage_data.items() if item.fqn in parts]
    _check_sums(folder, stored, alone)
    reader, planner = _Reader(folder), _LoadPlanner(parts)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*assuming the intent is to load in a single process")
            dcp.load({}, storage_reader=reader, planner=planner, no_dist=alone)
    except dcp.api.CheckpointException as error:
        raise _cause(error, folder) from error


def read_unsharded(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read full tensors, in one process.

    Raises:
        UserError: If the folder is no whole checkpoint.
    """
    stored = read_index(folder).state_dict_metadata
    found = {name: torch.empty(stored[name].size, dtype=stored[name].properties.dtype) for name in names}
    read_shards(folder, {name: as_local_shard(x) for name, x in found.items()}, alone=True)
    return found


def _check_sums(folder: Path, stored: list, alone: bool) -> None:
    """Verify the checksums of stored entries, which torch does not do; the ranks share the work.

    Raises:
        UserError: If an entry is damaged.
    """
    rank, ranks = (0, 1) if alone else (dist.get_rank(), dist.get_world_size())
    entries = sorted(stored, key=lambda entry: (entry.relative_path, entry.offset))
    damaged = [_first_damaged(folder, entries[rank::ranks])]
    if not alone:
        found = [None] * ranks
        dist.all_gather_object(found, damaged[0])
        damaged = found
    for message in filter(None, damaged):
        raise UserError(f"{folder} is damaged: its file {message}.")


def _first_damaged(folder: Path, entries: list) -> str | None:
    """Return the first file with an unreadable or damaged entry; each entry is a zip archive with CRC-32."""
    for entry in entries:
        try:
            with open(folder / entry.relative_path, "rb") as file:
                file.seek(entry.offset)
                content = io.BytesIO(file.read(entry.length))
        except OSError as error:  # returned, not raised, because the other ranks wait for the result
            return f"{entry.relative_path} cannot be read ({error.strerror})"
        try:
            with zipfile.ZipFile(content) as archive:
                is_damaged = archive.testzip() is not None
        except zipfile.BadZipFile:
            is_damaged = True
        if is_damaged:
            return f"{entry.relative_path} does not match its checksum"
    return None


def read_meta(folder: Path) -> dict:
    """Read the content other than tensors.

    Raises:
        UserError: If it cannot be read.
    """
    try:
        return torch.load(folder / META, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's message advises to load it unsafely
        raise UserError(f"{folder / META} cannot be read ({type(error).__name__}).") from error


def _cause(error: dcp.api.CheckpointException, folder: Path) -> Exception:
    """Return the first error of any rank."""
    first = next(iter(error.failures.values()))[0]
    if isinstance(first, OSError):
        return OSError(first.errno, first.strerror, first.filename or str(folder))
    return UserError(f"{folder}: {first}")


class _Reader(dcp.FileSystemReader):
    """Reads the JSON index; torch's index is a pickle, which can run code."""

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """Read the index."""
        return read_index(Path(self.path))


class _Writer(dcp.FileSystemWriter):
    """Writes the JSON index, and raises the OSError of a full disk."""

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> torch.futures.Future:
        """Write this rank's items."""
        with restoring_os_errors(Path(self.path)):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, on the first rank."""
        metadata.storage_data = {result.index: result.storage_data for of_rank in results for result in of_rank}
        write_index(Path(self.path), metadata)


class _SavePlanner(DefaultSavePlanner):
    """Stores the blocks of shards."""

    def __init__(self, parts: Mapping[str, LocalShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.parts = parts
        self.views = _views(parts)

    def create_local_plan(self) -> SavePlan:
        """Plan to write each block."""
        items = [self._item(index, view) for index, view in self.views.items()]
        self.plan = SavePlan(items)
        return self.plan

    def _item(self, index: MetadataIndex, view: Tensor) -> WriteItem:
        chunk = ChunkStorageMetadata(index.offset, view.shape)
        data = TensorWriteData(chunk, TensorProperties.create_from_tensor(view), self.parts[index.fqn].shape)
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return a block to write."""
        return self.views[index]


class _LoadPlanner(DefaultLoadPlanner):
    """Loads the blocks of shards."""

    def __init__(self, parts: Mapping[str, LocalShard]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.views = _views(parts)

    def create_local_plan(self) -> LoadPlan:
        """Plan to read each block from the stored blocks."""
        return LoadPlan([item for index, view in self.views.items() for item in self._items(index, view)])

    def _items(self, index: MetadataIndex, view: Tensor) -> list[ReadItem]:
        stored = self.metadata.state_dict_metadata[index.fqn]
        return create_read_items_for_chunk_list(index.fqn, stored, [ChunkStorageMetadata(index.offset, view.shape)])

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return a block to read into."""
        return self.views[index]


def _views(parts: Mapping[str, LocalShard]) -> dict[MetadataIndex, Tensor]:
    """Views of the blocks in the rank's tensors."""
    return {
        MetadataIndex(name, torch.Size(block.offset)): block.of_local(part.local)
        for name, part in parts.items()
        for block in part.blocks
    }
