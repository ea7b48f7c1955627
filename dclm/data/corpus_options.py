"""Settings that determine the content of a corpus of token files."""

from dataclasses import dataclass

from dctrain.errors import UserError

from .tokenizers import BYTES


@dataclass(frozen=True)
class CorpusOptions:
    """Settings that determine the content of a corpus, in addition to its inputs.

    Attributes:
        tokenizer: "bytes", "bpe:SIZE" (trained on the inputs), a `tokenizer.json`, or a hub name.
        eos: End-of-text token; None for the tokenizer's usual one.
        text_key: Key of the text in JSONL and parquet.
        val_fraction: Fraction of the documents, selected by a hash of their content, for the split "val".
        segment_tokens: Training tokens per file.
        num_val: Number of inputs, the last ones, whose documents are all in the split "val".
        is_within: Whether the split "val" is the last part of every document, because there are too few documents.
    """

    tokenizer: str = BYTES
    eos: str | None = None
    text_key: str = "text"
    val_fraction: float = 0.005
    segment_tokens: int = 10**8
    num_val: int = 0
    is_within: bool = False

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not 0 <= self.val_fraction < 1 or self.segment_tokens < 1:
            raise UserError(
                f"val_fraction={self.val_fraction} must be in [0, 1), segment_tokens={self.segment_tokens} at least 1."
            )
        kind, _, size = self.tokenizer.partition(":")
        if kind == "bpe" and not (size.isdecimal() and len(size) <= 8):
            raise UserError(f"tokenizer={self.tokenizer!r}; expected bpe:SIZE, such as bpe:16384.")
        if self.tokenizer == BYTES and self.eos is not None:
            raise UserError(f"eos={self.eos!r} is not supported with bytes; remove it.")
