"""Checkpoints of one process: one file, a zip archive as `torch.save` writes it."""

import zipfile
from pathlib import Path

import torch

from ..errors import UserError
from ..utils.files import atomic_write, replace_dir, restoring_os_errors


def write_file(content: dict, path: Path) -> None:
    """Write a checkpoint whole or not at all; a folder that has its name is there, whole, until then."""
    aside = path.with_name(f"{path.name}.0.partial") if path.is_dir() else path
    with restoring_os_errors(path), atomic_write(aside) as file:
        torch.save(content, file)
    if aside != path:
        replace_dir(aside, path)


def check_file(path: Path) -> None:
    """Compare the CRC-32 that torch writes with every tensor, and does not look at.

    Raises:
        UserError: If something is not what was written.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except Exception as error:
        raise _unreadable(path, error) from error
    if damaged:
        raise UserError(f"{path} is damaged: {damaged} in it is not what was written.")


def read_file(path: Path, *, mmap: bool) -> dict:
    """Read a checkpoint safely: tensors and plain values only.

    Args:
        path: The file.
        mmap: Map its tensors to memory, so that what is not used is not read.

    Raises:
        UserError: If it is no checkpoint.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch's message advises to load it unsafely
        raise _unreadable(path, error) from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is no checkpoint: it holds a {type(content).__name__}.")
    return content


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(f"{path} is no readable checkpoint ({type(error).__name__}).")
