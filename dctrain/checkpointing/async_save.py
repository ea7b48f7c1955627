"""Atomic saving, optionally in the background, and opening of sharded checkpoints."""

import io
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..utils.files import atomic_write, replace_dir
from .sharded import META, LocalShard, is_sharded, read_meta, read_shards, write_shards
from .sharded_index import read_index
from .single_file import check_file, read_file
from .training_state import flatten


class ShardedCheckpointWriter:
    """Saves checkpoints of all ranks to a temporary folder, which is then renamed.

    Args:
        in_background: Continue training while a copy in host memory is written.
    """

    def __init__(self, in_background: bool = False) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._group: dist.ProcessGroup | None = None
        self._pending: Future | None = None

    def save(self, path: Path, parts: Mapping[str, LocalShard], meta: dict) -> None:
        """Save a checkpoint after finishing the previous one; called on all ranks.

        Raises:
            OSError: If a rank cannot write this checkpoint or, in the background, the previous one.
        """
        self.finish()
        pickled = io.BytesIO()  # now, because callbacks may change their state later
        torch.save(meta, pickled)
        if self._thread is None:
            _save(path, parts, pickled.getvalue(), None)
            return
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        copied = {name: part._replace(local=part.local.to("cpu", copy=True)) for name, part in parts.items()}
        self._pending = self._thread.submit(_save, path, copied, pickled.getvalue(), self._group)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint may still be being written."""
        return self._pending is not None

    def finish(self) -> None:
        """Wait until the checkpoint is written.

        Raises:
            OSError: If a rank cannot write.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()


def _save(path: Path, parts: Mapping[str, LocalShard], meta: bytes, group: dist.ProcessGroup | None) -> None:
    aside = path.with_name(f"{path.name}.0.partial")
    try:
        _on_first_rank(partial(_begin, aside, meta), group)
        write_shards(aside, parts, group)
        _on_first_rank(partial(replace_dir, aside, path), group)
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _begin(aside: Path, meta: bytes) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with atomic_write(aside / META) as file:
        file.write(meta)


def _on_first_rank(function: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Call a function on the first rank; all ranks raise its error."""
    failed: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            function()
        except Exception as error:  # any error, because the other ranks are waiting
            failed = [error]
    dist.broadcast_object_list(failed, src=0, group=group)
    if failed[0] is not None:
        raise failed[0]


class StoredCheckpoint(NamedTuple):
    """An open checkpoint.

    Attributes:
        meta: Its content other than the tensors of model and optimizer.
        groups: Parameter groups of the optimizer.
        shapes: Shapes of its tensors by name.
        fill: Reads the shards of a rank; called on all ranks.
    """

    meta: dict
    groups: list[dict]
    shapes: dict[str, torch.Size]
    fill: Callable[[Mapping[str, LocalShard]], None]


def open_checkpoint(path: Path, groups: list[dict]) -> StoredCheckpoint:
    """Open a single-file or sharded checkpoint without loading its tensors; called on all ranks.

    Args:
        path: A folder, or a file, which is memory-mapped.
        groups: The optimizer's groups from `named_groups`, which name the indices in a file; [] to skip the optimizer.

    Raises:
        UserError: If it is incomplete or damaged.
    """
    if is_sharded(path):
        shapes = {name: stored.size for name, stored in read_index(path).state_dict_metadata.items()}
        meta = read_meta(path)
        fill = partial(read_shards, path)
    else:
        _on_first_rank(partial(check_file, path))
        meta = read_file(path, mmap=True)
        tensors = flatten(meta, groups)
        shapes, fill = {name: x.shape for name, x in tensors.items()}, partial(_copy, tensors)
    del meta["state_dict"]
    (optimizer,) = meta.pop("optimizer_states", [{"param_groups": []}])
    return StoredCheckpoint(meta, optimizer["param_groups"], shapes, fill)


def _copy(tensors: Mapping[str, Tensor], parts: Mapping[str, LocalShard]) -> None:
    for name, part in parts.items():
        for block in part.blocks:
            block.of_local(part.local).copy_(block.of_whole(tensors[name]))
