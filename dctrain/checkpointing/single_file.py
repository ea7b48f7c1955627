"""Single-process checkpoints: one file, a zip archive written by `torch.save`."""

import zipfile
from pathlib import Path

import torch

from ..errors import UserError
from ..utils.files import atomic_write, replace_dir, restoring_os_errors


def write_file(content: dict, path: Path) -> None:
    """Write a checkpoint atomically; an existing folder of this name is complete until it is replaced."""
    aside = path.with_name(f"{path.name}.0.partial") if path.is_dir() else path
    with restoring_os_errors(path), atomic_write(aside) as file:
        torch.save(content, file)
    if aside != path:
        replace_dir(aside, path)


def check_file(path: Path) -> None:
    """Verify the CRC-32 of all tensors, which torch writes but does not verify.

    Raises:
        UserError: If the file is damaged.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except Exception as error:
        raise _unreadable(path, error) from error
    if damaged:
        raise UserError(f"{path} is damaged: its entry {damaged} does not match its checksum.")


def read_file(path: Path, *, mmap: bool) -> dict:
    """Read a checkpoint safely: tensors and plain values only.

    Args:
        path: The file.
        mmap: Memory-map its tensors, so that unused ones are not read.

    Raises:
        UserError: If it is not a checkpoint.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch's message advises to load it unsafely
        raise _unreadable(path, error) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a checkpoint: it holds a {type(content).__name__}.")
    return content


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is not a readable checkpoint ({type(error).__name__}).")
