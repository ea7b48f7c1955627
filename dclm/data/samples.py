"""Samples and batches of token sequences."""

# B batch, T tokens

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from dctrain.data.sampler import SampleRef
from dctrain.errors import UserError

from ..loss import IGNORED
from .masking import Masking
from .megatron_indexed import IndexedRow
from .token_files import TokenRow


class TokenBatch(NamedTuple):
    """A batch, all int64 [B, T]; targets of padding sequences are -100."""

    input_ids: Tensor
    targets: Tensor
    document_ids: Tensor | None
    samples: list[int]


def as_batch(batch: TokenBatch | Sequence[Tensor]) -> TokenBatch:
    """Convert a batch of other loaders, (input_ids, targets)."""
    if isinstance(batch, TokenBatch):
        return batch
    if not isinstance(batch, list | tuple) or len(batch) != 2 or not all(isinstance(x, Tensor) for x in batch):
        got = type(batch).__name__
        raise UserError(f"the batch is {got}: expected a pair of tensors, (input_ids, targets).")
    return TokenBatch(*batch, document_ids=None, samples=[])


class Sample(NamedTuple):
    """A sequence and its targets.

    Attributes:
        ref: Reference of the sample.
        input_ids: Token ids [T].
        targets: Targets [T]; -100 is ignored.
        documents: Numbers of their documents [T], where they are kept apart.
    """

    ref: SampleRef
    input_ids: np.ndarray
    targets: np.ndarray
    document_ids: np.ndarray | None = None


class TokenSamples(Dataset):
    """Sequence i is tokens [i T, (i + 1) T) of a row; targets are the next tokens, or the masked ones.

    Args:
        row: The tokens.
        context_length: T.
        vocab_size: Upper limit of ids.
        separate_documents: Whether to return document indices, for attention within documents.
        masking: Masking; None for next-token prediction.
        mask_seed: Seed of the masks, which are a function of seed, epoch and i.
    """

    def __init__(
        self,
        row: TokenRow | IndexedRow,
        context_length: int,
        vocab_size: int,
        separate_documents: bool = False,
        masking: Masking | None = None,
        mask_seed: int = 0,
    ) -> None:
        self.row, self.context_length, self.vocab_size = row, context_length, vocab_size
        self.separate_documents, self.masking, self.mask_seed = separate_documents, masking, mask_seed

    def __len__(self) -> int:
        return max(0, len(self.row) - 1) // self.context_length

    def __getitem__(self, ref: SampleRef) -> Sample:
        start = ref.index * self.context_length
        tokens = self.row[start : start + self.context_length + 1]
        wrong = tokens[(tokens >= self.vocab_size) | (tokens < 0)]
        if len(wrong):
            raise UserError(
                f"{self.row.name} has token {wrong[0]} near token {start}; expected 0 to {self.vocab_size - 1}."
            )
        ids, targets = tokens[:-1], tokens[1:]
        document_ids = self.row.documents(start, ids) if self.separate_documents else None
        if self.masking is not None:
            ids, targets = self.masking(ids, (self.mask_seed, ref.epoch, ref.index))
        return Sample(ref, ids, targets, document_ids)


def collate(samples: list[Sample]) -> TokenBatch:
    """Stack sequences."""
    refs, rows, asked, document_ids = zip(*samples, strict=True)
    input_ids, targets = (torch.from_numpy(np.stack(those)) for those in (rows, asked))
    targets[[ref.is_padding for ref in refs]] = IGNORED
    numbers = None if document_ids[0] is None else torch.from_numpy(np.stack(document_ids))
    return TokenBatch(input_ids, targets, numbers, [ref.index for ref in refs])
