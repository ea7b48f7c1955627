"""Token files: the format of a prepared corpus, and reading it as one sequence of tokens per split.

FOLDER/manifest.json     format, dtype, vocabulary, end token; per split the files with tokens, bytes and SHA-256
FOLDER/tokenizer.json    unless tokens are bytes; the manifest has its SHA-256
FOLDER/train-0000.bin, val-0000.bin, ...    little-endian uint16 or uint32 ids; every document ends with the end token
FOLDER/val-0000-documents.npy, ...          tokens and bytes of each validation document, int64
"""

import json
from pathlib import Path

import numpy as np

from dctrain.data.dataset_cache import digest_lines, file_digest
from dctrain.errors import UserError, as_user_error

from .tokenizers import BYTES, Tokenizer, tokenizer_from_spec

FORMAT = "dclm-tokens-1"
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
SPLITS = ("train", "val")
TOKENIZER, TOKENIZER_DIGEST = "tokenizer.json", "tokenizer_sha256"


def token_dtype(vocab_size: int) -> str:
    """Return the smallest dtype for all ids."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class Corpus:
    """A prepared corpus.

    Args:
        folder: Folder of the corpus.

    Raises:
        UserError: If the folder is not a corpus, or has a different format.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        path = self.folder / "manifest.json"
        if not path.is_file():
            raise UserError(f"{self.folder} is not a prepared corpus (no manifest.json); see docs/data.md.")
        with as_user_error(f"{path} is damaged"):
            self.manifest = json.loads(path.read_text())
        if not isinstance(self.manifest, dict):
            raise UserError(f"{path} is damaged: expected a JSON object.")
        if self.manifest.get("format") != FORMAT or self.manifest.get("dtype") not in list(DTYPES):
            raise UserError(
                f"{path} has format {self.manifest.get('format')!r} and dtype {self.manifest.get('dtype')!r}; "
                f"expected {FORMAT!r} with {' or '.join(DTYPES)}."
            )
        self._check(path)
        self.vocab_size: int = self.manifest["vocab_size"]
        self.eos_id: int = self.manifest["eos_id"]
        self.eos: str | None = self.manifest.get("eos")
        self._tokenizer: Tokenizer | None = None

    def _check(self, path: Path) -> None:
        """Check the types of the manifest's fields.

        Raises:
            UserError: If a field is missing or has the wrong type.
        """
        manifest = self.manifest
        splits = manifest.get("splits")
        are_lists = isinstance(splits, dict) and all(isinstance(entries, list) for entries in splits.values())
        if not are_lists or not all(_is_entry(entry) for entries in splits.values() for entry in entries):
            raise UserError(f"{path} is damaged: its splits are not lists of files.")
        for name in ("vocab_size", "eos_id"):
            if type(manifest.get(name)) is not int or manifest[name] < 0:
                raise UserError(f"{path} is damaged: {name}={manifest.get(name)!r} is not a number.")
        if not isinstance(manifest.get(TOKENIZER_DIGEST), str | None):
            raise UserError(f"{path} is damaged: {TOKENIZER_DIGEST}={manifest[TOKENIZER_DIGEST]!r} is not a string.")
        if not isinstance(manifest.get("eos"), str | None):
            raise UserError(f"{path} is damaged: eos={manifest['eos']!r} is not a string.")

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of the corpus.

        Raises:
            UserError: If it is missing or was changed.
        """
        if self._tokenizer is None:
            path, digest = self.folder / TOKENIZER, self.manifest.get(TOKENIZER_DIGEST)
            spec = path.read_text() if path.is_file() else BYTES
            if digest is not None and (spec == BYTES or file_digest(path) != digest):
                raise UserError(
                    f"{path}, the tokenizer of the corpus, {'is missing' if spec == BYTES else 'has changed'}."
                )
            made = tokenizer_from_spec(spec, self.eos)
            is_too_small = made.vocab_size < self.vocab_size  # a vocabulary of bytes may be declared smaller
            if is_too_small or made.eos_id != self.eos_id or (spec != BYTES and made.vocab_size != self.vocab_size):
                raise UserError(
                    f"{path} {'is missing' if spec == BYTES else 'has changed'}: the tokens have a vocabulary of "
                    f"{self.vocab_size} with end token {self.eos_id}, not {made.vocab_size} with {made.eos_id}."
                )
            self._tokenizer = made
        return self._tokenizer

    @property
    def identity(self) -> str:
        """Combined digest of the training token files."""
        return digest_lines(str(entry.get("sha256")) for entry in self.manifest["splits"].get("train", []))

    def split(self, name: str) -> "TokenRow":
        """Open the tokens of "train" or "val"."""
        return TokenRow(self, name)


def _is_entry(entry: object) -> bool:
    """Whether an entry of a manifest describes a token file."""
    types = {"file": str, "tokens": int, "max_token": int}
    has_counts = isinstance(entry, dict) and "documents_file" in entry
    types |= {"documents_file": str, "bytes": int} if has_counts else {}
    return isinstance(entry, dict) and all(isinstance(entry.get(name), kind) for name, kind in types.items())


class TokenRow:
    """The tokens of one split as a memory-mapped sequence; `row[start:stop]` returns int64 ids.

    Args:
        corpus: The folder.
        split: "train" or "val".

    Raises:
        UserError: If a file is missing, truncated or empty, or its dtype does not match the manifest.
    """

    def __init__(self, corpus: Corpus, split: str) -> None:
        entries = corpus.manifest["splits"].get(split, [])
        dtype = DTYPES[corpus.manifest["dtype"]]
        self.name, self.eos_id = f"{corpus.folder}/{split}", corpus.eos_id
        self.files = [_map_file(corpus.folder / entry["file"], entry["tokens"], dtype) for entry in entries]
        self.starts = np.cumsum([0] + [len(file) for file in self.files])
        self.max_token = max((entry["max_token"] for entry in entries), default=-1)
        self._documents = [
            (corpus.folder / entry["documents_file"], entry["tokens"], entry["bytes"])
            for entry in entries
            if "documents_file" in entry
        ]
        self._counts_documents = bool(entries) and len(self._documents) == len(entries)

    def __len__(self) -> int:
        return int(self.starts[-1])

    def num_bytes(self, start: int, stop: int) -> float | None:
        """Count the bytes of source text of tokens [start, stop); None if unknown.

        For partial documents all tokens count as equally long.
        """
        if not self._counts_documents:
            return None
        tokens, sizes = np.concatenate([_read_documents(*entry) for entry in self._documents]).T
        ends = [np.concatenate([[0], np.cumsum(counts)]) for counts in (tokens, sizes)]
        low, high = np.interp([start, stop], *ends)
        return float(high - low)

    def documents(self, start: int, tokens: np.ndarray) -> np.ndarray:
        """Return document indices of consecutive tokens, from 0; an end token belongs to the document that it ends."""
        ends = (tokens == self.eos_id).astype(np.int64)
        return ends.cumsum() - ends

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(len(self))
        first = int(np.searchsorted(self.starts, start, "right")) - 1
        parts = []
        while start < stop:
            end = min(stop, int(self.starts[first + 1]))
            offset = int(self.starts[first])
            parts.append(self.files[first][start - offset : end - offset])
            start, first = end, first + 1
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)


def _read_documents(path: Path, num_tokens: int, num_bytes: int) -> np.ndarray:
    """Read the tokens and bytes of each document, int64 [documents, 2].

    Raises:
        UserError: If the file is damaged, or does not match the manifest.
    """
    with as_user_error(f"{path} is damaged"):
        counts = np.load(path)
    is_whole = counts.ndim == 2 and counts.shape[1] == 2 and np.issubdtype(counts.dtype, np.integer)
    if not is_whole or counts.min(initial=0) < 0 or counts.sum(0).tolist() != [num_tokens, num_bytes]:
        raise UserError(f"{path} is damaged: its documents do not sum to {num_tokens} tokens and {num_bytes} bytes.")
    return counts


def _map_file(path: Path, num_tokens: int, dtype: np.dtype) -> np.ndarray:
    if not path.is_file():
        raise UserError(f"{path} is missing.")
    size, expected = path.stat().st_size, num_tokens * dtype.itemsize
    if size != expected:
        raise UserError(
            f"{path} has {size} bytes; its manifest says {num_tokens} tokens of {dtype.name}, {expected} bytes: the "
            "file is truncated or has a different dtype."
        )
    return np.memmap(path, dtype, "r") if num_tokens else np.empty(0, dtype)
