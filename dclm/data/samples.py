"""From a row of tokens to batches of sequences."""

# B batch, T tokens

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dctrain.errors import UserError
from dctrain.order import SampleRef

from ..loss import IGNORED
from .idxmap import IndexedRow
from .token_files import TokenRow


class Batch(NamedTuple):
    """What a step gets, all int64 [B, T]; targets of sequences that only pad a rank's share are -100."""

    input_ids: Tensor
    targets: Tensor
    documents: Tensor | None
    samples: list[int]


def as_batch(batch: Batch | Sequence[Tensor]) -> Batch:
    """Take the batches of other loaders, (input_ids, targets)."""
    return batch if isinstance(batch, Batch) else Batch(*batch, documents=None, samples=[])


class Sample(NamedTuple):
    """Tokens of a sequence and one more.

    Attributes:
        ref: What it is.
        tokens: T + 1.
        documents: Numbers of their documents [T], where they are kept apart.
        counts: Which of the targets [T] count; None for all.
    """

    ref: SampleRef
    tokens: np.ndarray
    documents: np.ndarray | None
    counts: np.ndarray | None = None


class TokenSamples(Dataset):
    """Sequence number i is tokens [i T, (i + 1) T] of a row, its targets the same one further.

    Args:
        row: The tokens.
        context_length: T.
        vocab_size: Ids must be below it.
        separate_documents: Number the documents of each sequence, for attention within them.
    """

    def __init__(
        self, row: TokenRow | IndexedRow, context_length: int, vocab_size: int, separate_documents: bool = False
    ) -> None:
        self.row, self.context_length, self.vocab_size = row, context_length, vocab_size
        self.separate_documents = separate_documents

    def __len__(self) -> int:
        return max(0, len(self.row) - 1) // self.context_length

    def __getitem__(self, ref: SampleRef) -> Sample:
        start = ref.index * self.context_length
        tokens = self.row[start : start + self.context_length + 1]
        wrong = tokens[(tokens >= self.vocab_size) | (tokens < 0)]
        if len(wrong):
            raise UserError(
                f"{self.row.name} holds token {wrong[0]} near token {start}; accepted: 0 to {self.vocab_size - 1} "
                f"(data.vocab_size={self.vocab_size})."
            )
        return Sample(ref, tokens, self.row.documents(start, tokens[:-1]) if self.separate_documents else None)


def collate(samples: list[Sample]) -> Batch:
    """Stack sequences."""
    refs, rows, documents, counts = zip(*samples, strict=True)
    tokens = torch.from_numpy(np.stack(rows))
    input_ids, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
    if counts[0] is not None:
        targets[torch.from_numpy(~np.stack(counts))] = IGNORED
    targets[[ref.is_padding for ref in refs]] = IGNORED
    numbers = None if documents[0] is None else torch.from_numpy(np.stack(documents))
    return Batch(input_ids, targets, numbers, [ref.index for ref in refs])
