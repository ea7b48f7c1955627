"""Saving and opening checkpoints of many ranks, whole or not at all."""

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
    """Saves checkpoints of all ranks: aside, and then renamed.

    Args:
        in_background: Go on training while a copy, in the memory of the host, is written.
    """

    def __init__(self, in_background: bool = False) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint") if in_background else None
        self._group: dist.ProcessGroup | None = None
        self._pending: Future | None = None

    def save(self, path: Path, parts: Mapping[str, LocalShard], meta: dict) -> None:
        """Save a checkpoint, the one before being finished; all ranks call it.

        Raises:
            OSError: If a rank cannot write, this checkpoint or in the background the one before.
        """
        self.finish()
        pickled = io.BytesIO()  # now: what callbacks gave is theirs to change
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
        """Whether a checkpoint may still be on its way."""
        return self._pending is not None

    def finish(self) -> None:
        """Wait until what is being saved is there.

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
    """Call a function on the first rank; the others wait, and raise what it raises."""
    failed: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            function()
        except Exception as error:  # whatever it is, the others must not wait for more
            failed = [error]
    dist.broadcast_object_list(failed, src=0, group=group)
    if failed[0] is not None:
        raise failed[0]


class StoredCheckpoint(NamedTuple):
    """An open checkpoint.

    Attributes:
        meta: What it holds beside tensors of model and optimiser.
        groups: The optimiser's groups.
        shapes: Its tensors, by name.
        fill: Reads the parts that a rank holds; all ranks call it.
    """

    meta: dict
    groups: list[dict]
    shapes: dict[str, torch.Size]
    fill: Callable[[Mapping[str, LocalShard]], None]


def open_checkpoint(path: Path, groups: list[dict]) -> StoredCheckpoint:
    """Open a checkpoint of either kind, without keeping tensors; all ranks call it.

    Args:
        path: A folder, or a file, which is mapped to memory.
        groups: The optimiser's, as of `named_groups`, by which a file's numbers are named; [] to leave it out.

    Raises:
        UserError: If it is no whole checkpoint, or damaged.
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
