"""Index of a sharded checkpoint: its tensors, and where their blocks are stored.

The index of torch is a pickle, which can run code when it is read. This index is JSON:

    {"version": 1, "tensors": {NAME: {"dtype": "float32", "shape": [6, 4], "blocks": [
        {"offset": [0, 0], "shape": [3, 4], "file": "__0_0.distcp", "start": 0, "length": 1234}, ...]}}}

`offset` is the position of the block in the tensor; `start` and `length` are bytes of the file.
"""

import json
import math
from pathlib import Path

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ..errors import UserError
from ..utils.files import write_json

INDEX = "index.json"
VERSION = 1
KNOWN = {value for value in vars(torch).values() if isinstance(value, torch.dtype) and not value.is_complex}
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in KNOWN}


def write_index(folder: Path, metadata: Metadata) -> None:
    """Write the index of a checkpoint atomically."""
    tensors = {name: _encode(name, tensor, metadata) for name, tensor in metadata.state_dict_metadata.items()}
    write_json(folder / INDEX, {"version": VERSION, "tensors": tensors})


def _encode(name: str, tensor: TensorStorageMetadata, metadata: Metadata) -> dict:
    blocks = []
    for chunk in tensor.chunks:
        stored = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
        place = {"file": stored.relative_path, "start": stored.offset, "length": stored.length}
        blocks.append({"offset": list(chunk.offsets), "shape": list(chunk.sizes)} | place)
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": list(tensor.size), "blocks": blocks}


def read_index(folder: Path) -> Metadata:
    """Read the index of a checkpoint, and check that all files exist and have the indexed length.

    Raises:
        UserError: If the index is malformed, or a file is missing or too short.
    """
    path = folder / INDEX
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise ValueError(f"version={content['version']!r}: expected {VERSION}")
        metadata = Metadata({}, storage_data={})
        for name, tensor in content["tensors"].items():
            _decode(name, tensor, metadata)
    except OSError:
        raise
    except Exception as error:  # malformed content raises many types of errors
        message = f"missing {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UserError(f"{path} is not a valid index of a checkpoint ({message}).") from error
    _check_files(folder, metadata)
    return metadata


def _decode(name: str, tensor: dict, metadata: Metadata) -> None:
    """Add a tensor of the index to `metadata`.

    Raises:
        KeyError, TypeError, ValueError: If it is malformed.
    """
    dtype, shape = DTYPES[tensor["dtype"]], _sizes(tensor["shape"])
    chunks = []
    for block in tensor["blocks"]:
        chunk = ChunkStorageMetadata(_sizes(block["offset"]), _sizes(block["shape"]))
        stored = _StorageInfo(block["file"], *_sizes([block["start"], block["length"]]))
        _check_block(name, shape, dtype, chunk, stored)
        chunks.append(chunk)
        metadata.storage_data[MetadataIndex(name, chunk.offsets)] = stored
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise ValueError(f"the blocks of {name} do not cover its shape {list(shape)}")
    metadata.state_dict_metadata[name] = TensorStorageMetadata(TensorProperties(dtype), shape, chunks)


def _sizes(values: list) -> torch.Size:
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{values!r}: expected a list of integers of at least 0")
    return torch.Size(values)


def _check_block(
    name: str, shape: torch.Size, dtype: torch.dtype, chunk: ChunkStorageMetadata, stored: _StorageInfo
) -> None:
    """Check that a block is within its tensor, and that its file is in the folder and large enough.

    Raises:
        ValueError: If not.
    """
    ends = [offset + size for offset, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    if len(ends) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
        raise ValueError(f"a block of {name} is outside of its shape {list(shape)}")
    if not isinstance(stored.relative_path, str) or Path(stored.relative_path).name != stored.relative_path:
        raise ValueError(f"file={stored.relative_path!r}: expected a file name without a folder")
    if math.prod(chunk.sizes) * dtype.itemsize > stored.length:
        raise ValueError(f"a block of {name} is larger than its {stored.length} stored bytes")


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Check that all files exist and are long enough.

    Raises:
        UserError: If a file is missing or too short.
    """
    sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    for stored in metadata.storage_data.values():
        name = stored.relative_path
        if name not in sizes:
            raise UserError(f"{folder} is not a complete checkpoint: its file {name} is missing.")
        if sizes[name] < stored.offset + stored.length:
            raise UserError(
                f"{folder} is not a complete checkpoint: its file {name} is truncated at {sizes[name]:,} bytes."
            )
