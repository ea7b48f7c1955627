"""Writing files and folders that a crash or a full disk leaves whole: the old state or the new one. Reading files that
have an end.
"""

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
    """Yield a file beside `path`, which takes its place when the body is done and the disk has it; on an error it is
    removed.
    """
    path = path.resolve()  # of a link, what it leads to
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")  # two processes may write to one cache
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # the system does not say it of a full disk
        raise


@contextmanager
def held(path: Path, said: str) -> Iterator[None]:
    """Hold a lock file for the body. The lock of a process that died holds nobody.

    Raises:
        UserError: With what is `said`, if another process holds it.
    """
    lock = FileLock(path, timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise UserError(said) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def restoring_os_errors(path: Path) -> Iterator[None]:
    """Turn what torch's writer makes of an error of the system, such as a full disk, into that error again."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from error
        raise


def check_regular(path: Path) -> Path:
    """Return a path, unless what is there has no end or may never begin: a device, a pipe, a socket.

    Raises:
        OSError: If it is one of these, or nothing.
    """
    if not stat.S_ISREG(path.stat().st_mode) and not path.is_dir():
        raise OSError(errno.EINVAL, "Not a regular file (a device, pipe or socket)", str(path))
    return path


def check_writable(name: str, path: Path) -> None:
    """Check before long work that a file can be written: at a new path, or over a regular file.

    Raises:
        UserError: If something else is there, or a parent is no folder; it names the option.
    """
    parent = next((one for one in path.parents if one.exists()), path.parent)
    if path.exists() and not path.is_file():
        what = "is a folder" if path.is_dir() else "is no regular file"
        raise UserError(f"{name}={path} {what}: expected a file to write.")
    if not parent.is_dir():
        raise UserError(f"{name}={path}: {parent} is no folder.")


def write_json(path: Path, content: dict | list) -> None:
    """Write JSON whole."""
    with atomic_write(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


@contextmanager
def atomic_dir(folder: Path) -> Iterator[Path]:
    """Yield a new folder within `folder`, whose files move up when the body is done; on an error nothing stays."""
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
    """Rename a whole folder to a name that may be taken. What had it is there, whole, until then, and goes after."""
    before = path.with_name(f"before-{path.name}")
    if path.exists():
        os.replace(path, before)
    os.replace(folder, path)
    remove_atomically(before)


def remove_atomically(path: Path) -> None:
    """Remove a file or a folder, if it is there; a half of it is never found under its name."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    removed = path.with_name(f"{path.name}.0.partial")
    shutil.rmtree(removed, ignore_errors=True)
    os.replace(path, removed)
    shutil.rmtree(removed)


def relative(path: str | Path) -> Path:
    """Shorten a path below the working directory."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
