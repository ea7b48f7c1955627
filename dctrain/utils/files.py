"""Atomic writing of files and folders: after a crash or on a full disk either the old or the new state exists."""

import errno
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from ..errors import UserError


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` after the body, once it is synchronized to disk; removed on an
    error."""
    path = path.resolve()  # follow links
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # several processes may write the same file
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # not set by the system if the disk is full
        raise


@contextmanager
def file_lock(path: Path, message: str) -> Iterator[None]:
    """Hold a lock file during the body. The lock of a dead process is released by the system.

    Raises:
        UserError: With the message `message`, if another process holds the lock.
    """
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(message) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def restoring_os_errors(path: Path) -> Iterator[None]:
    """Raise the original OSError, such as a full disk, when torch's writer has converted it to a RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from error
        raise


def check_regular(path: Path) -> Path:
    """Return the path of a regular file or folder. Reading a device, pipe or socket might never end.

    Raises:
        OSError: If it is a device, pipe or socket, or does not exist.
    """
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise OSError(errno.EINVAL, "Not a regular file (a device, pipe or socket)", str(path))
    return path


def check_writable(name: str, path: Path) -> None:
    """Check before long work that a file can be created or overwritten.

    Raises:
        UserError: If the path is not a regular file, or a parent is not a folder; the message names the option.
    """
    parent = next((one for one in path.parents if one.exists()), path.parent)
    if path.exists() and not path.is_file():
        what = "is a folder" if path.is_dir() else "is not a regular file"
        raise UserError(f"{name}={path} {what}: expected a file to write.")
    if not parent.is_dir():
        raise UserError(f"{name}={path}: {parent} is not a folder.")


def write_json(path: Path, content: dict | list) -> None:
    """Write JSON atomically."""
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


@contextmanager
def atomic_dir(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder within `folder`, whose files are moved to `folder` after the body; removed on an
    error."""
    is_new = not folder.is_dir()
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder))
    try:
        yield partial
        for path in sorted(partial.iterdir()):
            os.replace(path, folder / path.name)
    except BaseException:
        shutil.rmtree(folder if is_new else partial)
        raise
    partial.rmdir()


def replace_dir(folder: Path, path: Path) -> None:
    """Rename `folder` to `path`, which may exist: it is complete until the rename, and removed afterwards."""
    before = path.with_name(f"before-{path.name}")
    if path.exists():
        os.replace(path, before)
    os.replace(folder, path)
    remove_atomically(before)


def remove_atomically(path: Path) -> None:
    """Remove a file or folder, if it exists; a partially removed folder never has the original name."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    removed = path.with_name(f"{path.name}.0.partial")
    shutil.rmtree(removed, ignore_errors=True)
    os.replace(path, removed)
    shutil.rmtree(removed)


def relative(path: str | Path) -> Path:
    """Return the path relative to the working directory if it is below it."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
