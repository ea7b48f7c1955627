"""Reading documents: text files, JSONL, and JSONL compressed with Zstandard (the Pile's format) or gzip (C4's)."""

import gzip
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dctrain.errors import UserError, told_as

JSONL = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json.gz")
COMPRESSED = (".zst", ".gz", ".bz2", ".xz", ".zip")
SUFFIXES = (*JSONL, ".txt", ".md", ".rst", ".py")


class Document(NamedTuple):
    """A text, or None where a text file is not UTF-8, and how much of its file has been read up to its end."""

    text: str | None
    position: int


def find_inputs(paths: list[Path], suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """List input files: those named, whatever their suffix, and those of some suffixes below folders named; each once.

    Raises:
        UserError: If a path does not exist or is of a compressed format that is not read, or nothing is found.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"input {path} does not exist.")
        if path.suffix in COMPRESSED and not path.name.endswith(JSONL):
            raise UserError(f"input {path} is compressed; of these {', '.join(JSONL[1:])} are read.")
        files += sorted(_below(path, suffixes)) if path.is_dir() else [path]
    if not files:
        raise UserError(f"no input below {', '.join(map(str, paths))}; looked for {', '.join(suffixes)}.")
    return list({file.resolve(): file for file in reversed(files)}.values())[::-1]


def _below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Find files in a folder, through symbolic links; each folder once."""
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if os.path.realpath(os.path.join(root, name)) not in seen]
        seen |= {os.path.realpath(os.path.join(root, name)) for name in folders}
        yield from (Path(root, name) for name in names if name.endswith(suffixes))


def read_documents(path: Path, text_key: str) -> Iterator[Document]:
    """Read the documents of a file: one of a text file, one per line of JSONL.

    Raises:
        UserError: If a line is no JSON object with a text under `text_key`, or the file is damaged.
    """
    if not path.name.endswith(JSONL):
        data = path.read_bytes()
        yield Document(_decoded(data), len(data))
        return
    with open(path, "rb") as file:
        lines = enumerate(_lines(file, path), 1)
        while True:
            with told_as(f"{path} is damaged"):
                number, line = next(lines, (0, None))
            if line is None:
                return
            if line.strip():
                yield Document(_json_text(line, path, number, text_key), file.tell())


def _lines(file: io.BufferedReader, path: Path) -> Iterator[bytes]:
    if path.suffix == ".gz":
        yield from gzip.GzipFile(fileobj=file)
        return
    if path.suffix != ".zst":
        yield from file
        return
    unfinished: list[bytes] = []
    for chunk in _decompressed(file):
        first, *others = chunk.split(b"\n")
        unfinished.append(first)
        if others:
            yield b"".join(unfinished)
            yield from others[:-1]
            unfinished = [others[-1]]
    yield b"".join(unfinished)


def _decompressed(file: io.BufferedReader) -> Iterator[bytes]:
    """Decompress frame by frame; a last frame that is cut off is an error, unlike in the library's reader."""
    import zstandard

    frame = None
    while data := file.read(2**18):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(data)
            data = frame.unused_data
            if frame.eof:
                frame = None
    if frame is not None:
        raise EOFError("the file is truncated")


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _json_text(line: bytes, path: Path, number: int, text_key: str) -> str:
    with told_as(f"{path}, line {number}: no JSON"):
        content = json.loads(line)
    if not isinstance(content, dict) or not isinstance(content.get(text_key), str):
        raise UserError(f"{path}, line {number}: no object with a text under {text_key!r}.")
    return content[text_key].encode(errors="replace").decode()  # a lone surrogate has no bytes
