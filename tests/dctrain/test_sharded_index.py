"""Index of sharded checkpoints: tensors are read back, and malformed indices are rejected before use."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dctrain.checkpointing.sharded import LocalShard, as_local_shard, read_shards, read_unsharded, write_shards
from dctrain.checkpointing.sharded_index import INDEX, read_index
from dctrain.distributed.layout import ShardBlock
from dctrain.errors import UserError


@pytest.fixture
def folder(tmp_path) -> Path:
    """Checkpoint with a matrix in two blocks, a float64 scalar and an empty vector, written by one rank."""
    x = torch.arange(12.0).reshape(4, 3)
    blocks = [ShardBlock((0, 0), (0, 0), (1, 3)), ShardBlock((1, 0), (1, 0), (3, 3))]
    parts = {"x": LocalShard(x, x.shape, blocks), "scalar": as_local_shard(torch.tensor(0.1, dtype=torch.float64))}
    parts["empty"] = as_local_shard(torch.empty(0, dtype=torch.bfloat16))
    if dist.is_initialized():  # left by a failed run of another test in this process
        dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        write_shards(tmp_path / "a.ckpt", parts)
    finally:
        dist.destroy_process_group()
    return tmp_path / "a.ckpt"


def test_tensors_are_read_back(folder):
    read = read_unsharded(folder, ["x", "scalar", "empty"])
    assert torch.equal(read["x"], torch.arange(12.0).reshape(4, 3))
    assert read["scalar"].item() == 0.1 and read["scalar"].dtype == torch.float64
    assert read["empty"].shape == (0,) and read["empty"].dtype == torch.bfloat16
    row = torch.empty(2, 3)
    read_shards(folder, {"x": LocalShard(row, torch.Size((4, 3)), [ShardBlock((0, 0), (1, 0), (2, 3))])}, alone=True)
    assert row.tolist() == [[3, 4, 5], [6, 7, 8]]


def _change(folder: Path, change: Callable[[dict], object]) -> None:
    content = json.loads((folder / INDEX).read_text())
    change(content)
    (folder / INDEX).write_text(json.dumps(content))


def _set(*keys_and_value: object) -> Callable[[dict], None]:
    """Return a change that sets `content[key][key]... = value`."""
    *keys, last, value = keys_and_value

    def change(content: dict) -> None:
        for key in keys:
            content = content[key]
        content[last] = value

    return change


FIRST = ("tensors", "x", "blocks", 0)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("version", 2), "version"),
        (_set("tensors", []), "list"),
        (_set("tensors", "x", "dtype", "os.system"), "os.system"),
        (_set("tensors", "x", "shape", [4, 10**9]), "x"),
        (_set("tensors", "x", "shape", [4.0, 3]), "4.0"),
        (_set("tensors", "x", "shape", "43"), "43"),
        (_set(*FIRST, "shape", [1, 10**12]), "x"),
        (_set(*FIRST, "offset", [-1, 0]), "-1"),
        (_set(*FIRST, "offset", [0]), "argument"),
        (_set(*FIRST, "file", "../a.ckpt/__0_0.distcp"), "file"),
        (_set(*FIRST, "file", None), "file"),
        (_set(*FIRST, "length", 1), "x"),
        (lambda content: content["tensors"]["x"]["blocks"].pop(), "x"),
        (lambda content: content["tensors"]["x"].pop("shape"), "shape"),
    ],
)
def test_malformed_index_is_rejected(folder, change, named):
    _change(folder, change)
    with pytest.raises(UserError, match=f"index.json.*{named}"):
        read_index(folder)


@pytest.mark.parametrize("content", [b"", b"[1]", b"null", b"[" * 100_000, b"\xff{}", b"{"])
def test_invalid_index_file_is_rejected(folder, content):
    (folder / INDEX).write_bytes(content)
    with pytest.raises(UserError, match=r"index\.json"):
        read_index(folder)


def test_block_shape_mismatch_with_index_is_rejected(folder):
    """The stored length is sufficient, so the mismatch is detected only when the block is read."""
    _change(folder, _set("tensors", "x", "dtype", "float16"))
    _change(folder, lambda content: content["tensors"]["x"]["blocks"].reverse())
    blocks = json.loads((folder / INDEX).read_text())["tensors"]["x"]["blocks"]
    _change(
        folder, _set("tensors", "x", "blocks", [blocks[0] | {k: blocks[1][k] for k in ("start", "length")}, blocks[1]])
    )
    with pytest.raises(UserError, match=r"a\.ckpt"):
        read_unsharded(folder, ["x"])
