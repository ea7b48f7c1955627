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


class TokenSamples(Dataset):
    """Sequence number i is tokens [i T, (i + 1) T] of a row, its targets the same one further.

    Args:
        row: The tokens.
        context_length: T.
        vocab_size: Ids must be below it.
    """

    def __init__(self, row: TokenRow, context_length: int, vocab_size: int) -> None:
        self.row, self.context_length, self.vocab_size = row, context_length, vocab_size

    def __len__(self) -> int:
        return max(0, len(self.row) - 1) // self.context_length

    def __getitem__(self, ref: SampleRef) -> tuple[SampleRef, np.ndarray]:
        start = ref.index * self.context_length
        tokens = self.row[start : start + self.context_length + 1]
        if tokens.max() >= self.vocab_size:
            raise UserError(
                f"{self.row.name} holds token {tokens.max()} near token {start}; accepted: 0 to {self.vocab_size - 1} "
                f"(data.vocab_size={self.vocab_size})."
            )
        return ref, tokens


class Collate:
    """Stacks sequences.

    Args:
        eos_id: Ends documents.
        separate_documents: Number the documents of each sequence, for attention within them.
    """

    def __init__(self, eos_id: int, separate_documents: bool) -> None:
        self.eos_id, self.separate_documents = eos_id, separate_documents

    def __call__(self, samples: list[tuple[SampleRef, np.ndarray]]) -> Batch:
        refs, rows = zip(*samples, strict=True)
        tokens = torch.from_numpy(np.stack(rows))
        input_ids, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        targets[[ref.is_padding for ref in refs]] = IGNORED
        documents = None
        if self.separate_documents:
            ends = (input_ids == self.eos_id).long()
            documents = ends.cumsum(1) - ends  # an end token belongs to the document that it ends
        return Batch(input_ids, targets, documents, [ref.index for ref in refs])
