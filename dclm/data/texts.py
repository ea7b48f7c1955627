"""Reading documents: text files, JSONL, JSONL compressed with Zstandard (the Pile's format) or gzip (C4's), parquet."""

import gzip
import io
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from dctrain.errors import UserError, as_user_error
from dctrain.utils.files import check_regular

JSONL = (".jsonl", ".jsonl.zst", ".jsonl.gz", ".json.gz")
COMPRESSED = (".zst", ".gz", ".bz2", ".xz", ".zip")
RECORDS = (*JSONL, ".parquet")
PARQUET_ROWS = 256  # rows in memory at a time
SUFFIXES = (*RECORDS, ".txt", ".md", ".rst", ".py")


class Document(NamedTuple):
    """A document of a file.

    Attributes:
        text: The text; None if a text file is not UTF-8.
        position: Bytes of the file read up to the end of the document.
        subset: Name of its subset, if any.
    """

    text: str | None
    position: int
    subset: str | None = None


def find_inputs(paths: list[Path], suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """Return the input files: given files, and files with accepted suffixes in given folders; without duplicates.

    Raises:
        UserError: If a path does not exist or has an unsupported compressed format, or nothing is found.
        OSError: If a path is a device, pipe or socket.
    """
    files: list[Path] = []
    for path in paths:
        if not path.exists():
            raise UserError(f"input {path} does not exist.")
        if path.suffix in COMPRESSED and not path.name.endswith(JSONL):
            raise UserError(f"input {path} is compressed; expected one of {', '.join(JSONL[1:])}.")
        if path.suffix == ".json":
            raise UserError(f"input {path} is a single JSON document; expected .jsonl with one record per line.")
        files += map(check_regular, sorted(_below(path, suffixes)) if path.is_dir() else [path])
    if not files:
        raise UserError(f"no input in {', '.join(map(str, paths))}; expected files with suffix {', '.join(suffixes)}.")
    return list({file.resolve(): file for file in reversed(files)}.values())[::-1]


def _below(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of a folder, following symbolic links; each folder once."""
    seen = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if os.path.realpath(os.path.join(root, name)) not in seen]
        seen |= {os.path.realpath(os.path.join(root, name)) for name in folders}
        yield from (Path(root, name) for name in names if name.endswith(suffixes))


def read_documents(path: Path, text_key: str, subset_key: str | None = None) -> Iterator[Document]:
    """Read the documents of a file: one of a text file, one per line of JSONL or row of parquet.

    Args:
        path: The file.
        text_key: Key of the text in a record.
        subset_key: Key of a record's subset name; dots separate nested keys ("meta.pile_set_name").

    Raises:
        UserError: If a record has no text under `text_key`, or the file is damaged.
    """
    if not path.name.endswith(RECORDS):
        data = path.read_bytes()
        yield Document(_decoded(data), len(data))
        return
    columns = [text_key] if subset_key is None else [text_key, subset_key, subset_key.split(".")[0]]
    for record in read_records(path, columns):
        text = record.content.get(text_key)
        if not isinstance(text, str):
            raise UserError(f"{record.place}: no text with key {text_key!r}.")
        subset = None if subset_key is None else _subset(record.content, subset_key)
        yield Document(without_lone_surrogates(text), record.position, subset)


def gathered(documents: Iterable[Document], size: int = 2**20) -> Iterator[tuple[list[Document], int]]:
    """Group documents into batches of about `size` characters, each with the number of documents that are not UTF-8."""
    found: list[Document] = []
    unreadable = held = 0
    for document in documents:
        if document.text is None:
            unreadable += 1
        else:
            found.append(document)
            held += len(document.text)
        if held >= size:
            yield found, unreadable
            found, unreadable, held = [], 0, 0
    yield found, unreadable


class Record(NamedTuple):
    """A JSON object of a file: content, location for messages, and bytes of the file read up to its end."""

    content: dict
    place: str
    position: int


def read_records(path: Path, keys: list[str]) -> Iterator[Record]:
    """Read the objects of JSONL, optionally compressed, or of parquet, where only the columns of `keys` are read.

    Raises:
        UserError: If a line is not a JSON object, or the file is damaged.
    """
    if path.suffix == ".parquet":
        yield from _parquet_records(path, keys)
        return
    with open(path, "rb") as file:
        lines = enumerate(_lines(file, path), 1)
        while True:
            with as_user_error(f"{path} is damaged"):
                number, line = next(lines, (0, None))
            if line is None:
                return
            if line.strip():
                place = f"{path}, line {number}"
                yield Record(_json_object(line, place), place, file.tell())


def _parquet_records(path: Path, keys: list[str]) -> Iterator[Record]:
    from pyarrow import parquet

    with as_user_error(f"{path} is damaged"):
        file = parquet.ParquetFile(path)
    size, total, count = path.stat().st_size, max(1, file.metadata.num_rows), 0
    there = [name for name in dict.fromkeys(keys) if name in file.schema_arrow.names]
    with file:
        batches = file.iter_batches(PARQUET_ROWS, columns=there)
        while True:
            with as_user_error(f"{path} is damaged"):
                batch = next(batches, None)
            if batch is None:
                return
            for content in batch.to_pylist():
                count += 1
                yield Record(content, f"{path}, row {count}", size * count // total)


def _subset(content: dict, key: str) -> str | None:
    """Return a name by a key, or by a path of keys."""
    found: object = content
    if key in content:
        return None if content[key] is None else str(content[key])
    for name in key.split("."):
        found = found.get(name) if isinstance(found, dict) else None
    return None if found is None else str(found)


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
    """Decompress frame by frame; unlike the library's reader, raise an error for a truncated last frame."""
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


def _json_object(line: bytes, place: str) -> dict:
    with as_user_error(f"{place}: not JSON"):
        content = json.loads(line)
    if not isinstance(content, dict):
        raise UserError(f"{place}: not a JSON object.")
    return content


def without_lone_surrogates(text: str) -> str:
    """Replace lone surrogates, which JSON can contain and which cannot be encoded."""
    return text.encode(errors="replace").decode()
