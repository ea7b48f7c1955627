"""Segments of a corpus while they are written: pairs of a train and a val file."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dctrain.data.dataset_cache import file_digest
from dctrain.utils.files import atomic_write

from .token_files import DTYPES, SPLITS, token_dtype
from .tokenizers import Tokenizer


class CorpusPosition(NamedTuple):
    """Position of a preparation: number of documents read from input `file`."""

    file: int = 0
    documents: int = 0


class DocumentBatch(NamedTuple):
    """A batch of documents or parts of documents.

    Attributes:
        texts: The documents.
        is_val: Whether each is for validation.
        unreadable: Indices of files that are not UTF-8.
        place: Position after the batch.
    """

    texts: list[str]
    is_val: list[bool]
    unreadable: list[int]
    place: CorpusPosition


class TokenSegment:
    """A segment being written: a train and a val file.

    Args:
        out: Folder of the corpus.
        number: Index of the segment.
        tokenizer: The corpus's tokenizer.
    """

    def __init__(self, out: Path, number: int, tokenizer: Tokenizer) -> None:
        self.out, self.eos_id = out, tokenizer.eos_id
        self.dtype = DTYPES[token_dtype(tokenizer.vocab_size)]
        self.names = {split: f"{split}-{number:04d}.bin" for split in SPLITS}
        self.files = {
            split: open(out / f"{name}.partial", "wb")  # noqa: SIM115  closed by close()
            for split, name in self.names.items()
        }
        self.hashes = {split: hashlib.sha256() for split in SPLITS}
        self.counts = {split: {"tokens": 0, "bytes": 0, "documents": 0, "max_token": -1} for split in SPLITS}
        self.val_documents: list[tuple[int, int]] = []  # tokens and bytes per document

    @property
    def num_tokens(self) -> int:
        """Training tokens so far."""
        return self.counts["train"]["tokens"]

    def add(self, batch: DocumentBatch, rows: list[np.ndarray]) -> None:
        """Add documents, each as text and as tokens."""
        for text, is_val, ids in zip(batch.texts, batch.is_val, rows, strict=True):
            split = "val" if is_val else "train"
            data = np.append(ids.astype(self.dtype), self.dtype.type(self.eos_id)).tobytes()
            self.files[split].write(data)
            self.hashes[split].update(data)
            count = self.counts[split]
            count["tokens"] += len(ids) + 1
            count["bytes"] += len(text.encode())
            count["documents"] += 1
            count["max_token"] = max(count["max_token"], self.eos_id, int(ids.max(initial=0)))
            if split == "val":
                self.val_documents.append((len(ids) + 1, len(text.encode())))

    def close(self) -> dict:
        """Finish the files and return their entries for the manifest; empty files are removed."""
        entries = {}
        for split, name in self.names.items():
            file = self.files[split]
            file.flush()
            os.fsync(file.fileno())
            file.close()
            if self.counts[split]["tokens"]:
                os.replace(file.name, self.out / name)
                entries[split] = {"file": name, **self.counts[split], "sha256": self.hashes[split].hexdigest()}
            else:
                os.remove(file.name)
        if self.val_documents:
            path = self.out / self.names["val"].replace(".bin", "-documents.npy")
            with atomic_write(path) as file:
                np.save(file, np.array(self.val_documents, dtype="<i8"))
            entries["val"] |= {"documents_file": path.name, "documents_sha256": file_digest(path)}
        return entries

    def discard(self) -> None:
        """Remove unfinished files."""
        for file in self.files.values():
            with suppress(OSError):  # flushing fails on a full disk
                file.close()
            Path(file.name).unlink(missing_ok=True)
