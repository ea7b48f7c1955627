"""Writing files and folders that a crash or a full disk leaves whole: the old state or the new one."""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a file beside `path`, which takes its place when the body is done and the disk has it; on an error it is
    removed.
    """
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


def write_json(path: Path, content: dict | list) -> None:
    """Write JSON whole."""
    with written_whole(path) as file:
        file.write((json.dumps(content, indent=1) + "\n").encode())


@contextmanager
def filled_whole(folder: Path) -> Iterator[Path]:
    """Yield a new folder beside `folder`, whose files are moved there when the body is done; it is removed then."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.partial-", dir=folder.parent))
    try:
        yield partial
        folder.mkdir(exist_ok=True)
        for path in sorted(partial.iterdir()):
            os.replace(path, folder / path.name)
    finally:
        shutil.rmtree(partial)
