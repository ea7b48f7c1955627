"""Layout of sharded parameters: the part that each rank holds."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dcmha.parallel import ShardedDim

HEADS, SHARDS, REPLICAS = "heads", "shards", "replicas"  # axes of a mesh
WHOLE = ShardedDim()


class ShardBlock(NamedTuple):
    """A block of a parameter held by a rank.

    Attributes:
        local: Start in the rank's tensor.
        offset: Start in the full parameter.
        sizes: Shape of the block.
    """

    local: tuple[int, ...]
    offset: tuple[int, ...]
    sizes: tuple[int, ...]

    def of_local(self, x: Tensor) -> Tensor:
        """View the block in the rank's tensor."""
        return _narrow(x, self.local, self.sizes)

    def of_whole(self, x: Tensor) -> Tensor:
        """View the block in the full parameter."""
        return _narrow(x, self.offset, self.sizes)


def _narrow(x: Tensor, starts: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        x = x.narrow(dim, start, size)
    return x


class ShardSpan(NamedTuple):
    """Consecutive rows or columns: start in a rank's tensor, start in the full one, size."""

    local: int
    offset: int
    size: int


class RankShare(NamedTuple):
    """Index of a rank and the number of ranks."""

    rank: int
    ranks: int

    def of(self, size: int) -> tuple[int, int]:
        """Return start and end of the rank's part of a size, as in `torch.chunk`."""
        each = -(-size // self.ranks)
        return min(size, self.rank * each), min(size, (self.rank + 1) * each)


def split_blocks(shape: torch.Size, split: ShardedDim, heads: RankShare) -> list[ShardBlock]:
    """Return the blocks of a parameter of a given shape that a rank has under tensor parallelism."""
    return list(_blocks(shape, _spans(shape, split, heads), split.dim or 0))


def _blocks(shape: torch.Size, spans: list[ShardSpan], dim: int) -> Iterator[ShardBlock]:
    for local, offset, size in spans:
        starts = [(0,) * dim + (start,) + (0,) * (len(shape) - dim - 1) for start in (local, offset)]
        yield ShardBlock(*starts, (*shape[:dim], size, *shape[dim + 1 :]))


def _spans(shape: torch.Size, split: ShardedDim, heads: RankShare) -> list[ShardSpan]:
    """Return a rank's spans of the split axis; of the first axis, if none is split."""
    if split.dim is None:
        return [ShardSpan(0, 0, shape[0])]
    spans, unit, local, offset = [], shape[split.dim] // sum(split.parts), 0, 0
    for part in split.parts:
        start, end = heads.of(unit * part)
        spans.append(ShardSpan(local, offset + start, end - start))
        local, offset = local + end - start, offset + unit * part
    return spans


def _cut_rows(block: ShardBlock, start: int, end: int) -> ShardBlock | None:
    """Restrict a block to the rows of a shard of the rank's tensor; None if they do not overlap."""
    first = max(start, block.local[0])
    rows = min(end, block.local[0] + block.sizes[0]) - first
    if rows <= 0:
        return None
    offset = block.offset[0] + first - block.local[0]
    return ShardBlock((first - start, *block.local[1:]), (offset, *block.offset[1:]), (rows, *block.sizes[1:]))


class Layout:
    """Parts of a model's parameters held by one rank: its share of the heads, and a shard of the rows of that.

    Args:
        mesh: Mesh with some of the axes `HEADS`, `SHARDS` and `REPLICAS`.
        splits: How tensor parallelism splits parameters, by name; parameters without an entry are not split.
    """

    def __init__(self, mesh: DeviceMesh, splits: Mapping[str, ShardedDim]) -> None:
        self.splits = splits
        self.heads, self.shard = (_share(mesh, axis) for axis in (HEADS, SHARDS))

    def blocks(self, name: str, shape: torch.Size) -> list[ShardBlock]:
        """Return the blocks of a parameter of a given shape that this rank holds."""
        blocks = split_blocks(shape, self.splits.get(name, WHOLE), self.heads)
        rows = max(block.local[0] + block.sizes[0] for block in blocks)
        cut = (_cut_rows(block, *self.shard.of(rows)) for block in blocks)
        return [block for block in cut if block is not None]


def _share(mesh: DeviceMesh, axis: str) -> RankShare:
    if axis not in (mesh.mesh_dim_names or ()):
        return RankShare(0, 1)
    return RankShare(mesh.get_local_rank(axis), mesh[axis].size())
