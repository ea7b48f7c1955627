"""Megatron's indexed format, as Pythia's pre-tokenised Pile is published: tokens to be read where they lie.

PREFIX.bin    token ids of one sequence after the other
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
    """Tokens that another program made; the same interface as `Corpus`, but that all tokens are of any split.

    Args:
        prefix: Path of the two files without their suffixes.
        tokenizer: The one that made the tokens, which they do not say.

    Raises:
        UserError: If a file is missing, damaged, or does not fit the other.
    """

    def __init__(self, prefix: str | Path, tokenizer: Tokenizer) -> None:
        self.folder = Path(prefix)
        self._tokenizer = tokenizer
        self.vocab_size, self.eos_id, self.eos = tokenizer.vocab_size, tokenizer.eos_id, None
        self._row = IndexedRow(self.folder, self.vocab_size)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer that made the tokens."""
        return self._tokenizer

    def split(self, name: str) -> "IndexedRow":
        """Return all tokens."""
        return self._row


class IndexedRow:
    """All tokens in a row, memory-mapped; as a sequence, `row[start:stop]` gives int64 ids.

    Attributes:
        name: Of the files.
        max_token: The largest that the tokenizer has; samples are checked when they are read.
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
                "the two are of different data, or one is damaged."
            )
        self._tokens = np.memmap(tokens, self._dtype, "r")

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, span: slice) -> np.ndarray:
        return self._tokens[span].astype(np.int64)

    def num_bytes(self, start: int, stop: int) -> None:
        """Tell that the bytes of source text are not known."""

    def documents(self, start: int, tokens: np.ndarray) -> np.ndarray:
        """Number the documents of neighbouring tokens, from 0."""
        places = (start + np.arange(len(tokens))) * self._dtype.itemsize
        sequences = np.searchsorted(self._places, places, "right") - 1
        numbers = np.searchsorted(self._documents, sequences, "right")
        return numbers - numbers[0]


def _read_header(path: Path) -> tuple[str, int, int]:
    """Return the dtype, the sequences, and the marks of documents."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or head[: len(MAGIC)] != MAGIC:
        raise UserError(f"{path} is no index of Megatron's format (it does not begin with MMIDIDX).")
    _, version, code, count, marks = HEADER.unpack(head)
    if version != 1 or code not in DTYPES:
        accepted = ", ".join(map(str, DTYPES))
        raise UserError(
            f"{path} has version {version} and dtype code {code}; expected version 1, integers ({accepted})."
        )
    expected = HEADER.size + 12 * count + 8 * marks
    if size != expected or count == 0 or marks == 0:
        raise UserError(f"{path} has {size} bytes; {count} sequences and {marks} marks of documents take {expected}.")
    return DTYPES[code], count, marks
