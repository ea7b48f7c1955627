"""Loss and accuracy of bidirectional models on masked tokens of texts."""

import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dctrain.data.dataset_cache import file_digest
from dctrain.errors import UserError
from dctrain.evaluation.results import Measure

from ..data.masking import Masking
from ..data.texts import find_inputs, gathered, read_documents
from .measures import standard_error
from .scorer import MaskedScore, Scorer

SEED = 0


class MaskedTexts(NamedTuple):
    """Loss and accuracy of masked tokens.

    Documents are processed separately, after the token that begins a text, and split into pieces of the context length.
    The masks of a piece are a function of its index.

    Attributes:
        name: Name in the table.
        path: A file for `read_documents`, or a folder of such files.
        text_key: As in `read_documents`.
        mask_fraction: Fraction of masked tokens.
        mask_span: As in `Masking`.
        limit: Maximum number of documents.
    """

    name: str
    path: str
    text_key: str
    mask_fraction: float
    mask_span: float
    limit: int | None

    @property
    def title(self) -> str:
        """Unique title."""
        return f"masked {self.path}"

    @property
    def files(self) -> list[Path]:
        """The file, or the files of the folder."""
        return find_inputs([Path(self.path)])

    def settings(self, scorer: Scorer) -> dict:
        """Settings that the numbers depend on, other than the model."""
        return {
            "text_key": self.text_key,
            "mask_fraction": self.mask_fraction,
            "mask_span": self.mask_span,
            "limit": self.limit,
            "sha256": [file_digest(file) for file in self.files],
            "context_length": scorer.context_length,
        }

    def run(self, scorer: Scorer) -> tuple[list[Measure], str | None]:
        """Score all documents; the note reports files that are not UTF-8.

        Raises:
            UserError: If the model is causal, its vocabulary has no mask token, or there is no text.
        """
        masking = self._masking(scorer)
        scores: list[MaskedScore] = []
        skipped = 0
        documents = (document for file in self.files for document in read_documents(file, self.text_key))
        for readable, unreadable in gathered(islice(documents, self.limit)):
            skipped += unreadable
            pieces = _pieces(scorer, [document.text for document in readable])
            masked = [masking(ids, (SEED, number)) for number, ids in enumerate(pieces, len(scores))]
            scores += scorer.score_masked(masked, self.name)
        if not sum(score.count for score in scores):
            raise UserError(
                f"{self.path} has too little text to score{' (some files are not UTF-8)' if skipped else ''}."
            )
        note = f"{self.mask_fraction:.0%} masked, spans of {self.mask_span:g}"
        note += f"; skipped {skipped} files that are not UTF-8" if skipped else ""
        return _measures(self.name, scores), note

    def _masking(self, scorer: Scorer) -> Masking:
        config, words = scorer.decoder.config, scorer.tokenizer
        if config.is_causal:
            raise UserError("masked requires a bidirectional model (is_causal=false).")
        if words.vocab_size >= config.vocab_size:
            raise UserError(
                f"the model's vocabulary of {config.vocab_size} has no mask token after the tokenizer's tokens."
            )
        return Masking(self.mask_fraction, self.mask_span, words.vocab_size, (words.eos_id, *words.begin_ids))


def _pieces(scorer: Scorer, texts: Sequence[str]) -> Iterator[np.ndarray]:
    """Split documents into pieces of the context length; the last piece of each is shorter."""
    words, length = scorer.tokenizer, scorer.context_length
    begin = words.begin_ids or [words.eos_id]
    for row in words.encode(texts):
        ids = np.array([*begin, *row.tolist()])
        yield from (ids[start : start + length] for start in range(0, len(ids), length))


def _measures(name: str, scores: Sequence[MaskedScore]) -> list[Measure]:
    count = sum(score.count for score in scores)
    accuracy = sum(score.num_right for score in scores) / count
    error = standard_error(accuracy, count)
    loss = -math.fsum(score.log_likelihood for score in scores) / count
    return [
        Measure(name, "masked_loss", loss, None, False, count, "tokens"),
        Measure(name, "masked_accuracy", accuracy, error, True, count, "tokens"),
    ]
