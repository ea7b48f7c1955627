"""Megatron's indexed format, as used for Pythia's pre-tokenized Pile.

PREFIX.bin    token ids of all sequences
PREFIX.idx    b"MMIDIDX\\0\\0", version 1 (uint64), code of the dtype (uint8), N sequences and M + 1 (uint64 each);
              N lengths (int32), N places in bytes (int64), and the first sequences of M documents and N (int64)

All numbers are little-endian.
"""

import struct
from pathlib import Path

import numpy as np

from dctrain.errors import UserError

from .tokenizers import Tokenizer

PREFIX = "idxmap:"
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class IndexedCorpus:
    """Tokens in Megatron's format, with the interface of `Corpus`; all tokens belong to every split.

    Args:
        prefix: Path of the two files without their suffixes.
        tokenizer: Tokenizer of the tokens, which the files do not contain.

    Raises:
        UserError: If a file is missing or damaged, or the files do not match.
    """

    def __init__(self, prefix: str | Path, tokenizer: Tokenizer) -> None:
        self.folder = Path(prefix)
        self._tokenizer = tokenizer
        self.vocab_size, self.eos_id, self.eos = tokenizer.vocab_size, tokenizer.eos_id, None
        self._row = IndexedRow(self.folder, self.vocab_size)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self._tokenizer

    def split(self, name: str) -> "IndexedRow":
        """Return all tokens."""
        return self._row


class IndexedRow:
    """All tokens as one memory-mapped sequence; `row[start:stop]` returns int64 ids.

    Attributes:
        name: Name of the files.
        max_token: The tokenizer's largest id; tokens are checked when they are read.
    """

    def __init__(self, prefix: Path, vocab_size: int) -> None:
        self.name, self.max_token = str(prefix), vocab_size - 1
        index, tokens = (Path(f"{prefix}{suffix}") for suffix in (".idx", ".bin"))
        for path in (index, tokens):
            if not path.is_file():
                raise UserError(f"{path} is missing; expected idxmap:PREFIX of PREFIX.bin and PREFIX.idx.")
        dtype, count, marks = _read_header(index)
        self._dtype = np.dtype(dtype)
        lengths = np.memmap(index, "<i4", "r", HEADER.size, (count,))
        self._places = np.memmap(index, "<i8", "r", HEADER.size + 4 * count, (count,))
        self._documents = np.memmap(index, "<i8", "r", HEADER.size + 12 * count, (marks,))
        expected, size = int(self._places[-1]) + int(lengths[-1]) * self._dtype.itemsize, tokens.stat().st_size
        if size != expected or self._places[0] != 0 or self._documents[-1] != count:
            raise UserError(
                f"{tokens} has {size} bytes; {index} says {expected}, of {count} sequences of {self._dtype.name}: "
                "the files do not belong together, or one is damaged."
            )
        self._tokens = np.memmap(tokens, self._dtype, "r")

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, span: slice) -> np.ndarray:
        return self._tokens[span].astype(np.int64)

    def num_bytes(self, start: int, stop: int) -> None:
        """Return None: the bytes of source text are unknown."""

    def documents(self, start: int, tokens: np.ndarray) -> np.ndarray:
        """Return document indices of consecutive tokens, from 0."""
        places = (start + np.arange(len(tokens))) * self._dtype.itemsize
        sequences = np.searchsorted(self._places, places, "right") - 1
        numbers = np.searchsorted(self._documents, sequences, "right")
        return numbers - numbers[0]


def _read_header(path: Path) -> tuple[str, int, int]:
    """Return the dtype, the number of sequences, and the number of document boundaries."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path} is not an index in Megatron's format (it does not start with MMIDIDX).")
    _, version, code, count, marks = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        accepted = ", ".join(map(str, DTYPES))
        raise UserError(
            f"{path} has version {version} and dtype code {code}; expected version 1, integers ({accepted})."
        )
    expected = HEADER.size + 12 * count + 8 * marks
    if size != expected or count == 0 or marks == 0:
        raise UserError(
            f"{path} has {size} bytes; {count} sequences and {marks} document boundaries require {expected}."
        )
    return DTYPES[code], count, marks
