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
