"""Split of a corpus into training and validation text."""

import hashlib
import json
import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .corpus_options import CorpusOptions
from .texts import read_documents

PLAN = "plan.json"
MAX_PEEKED = 10_000  # maximum documents searched for a validation document


@dataclass(frozen=True)
class ValidationSplit:
    """Split of documents into training and validation parts.

    Attributes:
        options: Settings of the split.
        num_files: Number of training inputs; all later inputs are for validation.
    """

    options: CorpusOptions
    num_files: int

    def parts(self, text: str, file: int) -> list[tuple[str, bool]]:
        """Return the parts of a document of input `file`, each with whether it is for validation."""
        if file >= self.num_files:
            return [(text, True)]
        if not self.options.is_within:
            return [(text, _is_val(text, self.options.val_fraction))]
        cut = _cut(text, math.ceil(len(text) * self.options.val_fraction))
        return [(part, is_val) for part, is_val in ((text[:cut], False), (text[cut:], True)) if part]


def _cut(text: str, count: int) -> int:
    """Return the start of the last `count` characters, moved back to a line or word boundary if one is near."""
    position = len(text) - count
    start = max(0, position - count // 2)
    return next((at + 1 for end in "\n " if (at := text.rfind(end, start, position)) >= 0), position)


def is_split_within(files: list[Path], out: Path, options: CorpusOptions) -> bool:
    """Whether documents are split within: as recorded for an existing corpus, else if no document is selected."""
    plan = out / PLAN
    if plan.is_file():
        with suppress(ValueError, AttributeError):  # a damaged plan raises an error in a later comparison
            return bool(json.loads(plan.read_text()).get("is_within", False))
    return not _has_val(files, options)


def _has_val(files: list[Path], options: CorpusOptions) -> bool:
    """Whether any document is selected for validation; True if there are too many to check."""
    count = 0
    for file in files:
        for document in read_documents(file, options.text_key):
            count += 1
            if count > MAX_PEEKED or (document.text is not None and _is_val(document.text, options.val_fraction)):
                return True
    return False


def _is_val(text: str, fraction: float) -> bool:
    """Select by a hash of the content, so that equal documents are in the same split."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < fraction * 2**64
