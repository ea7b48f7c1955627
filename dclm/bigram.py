"""A byte-bigram model of text: the baseline that any language model must beat."""

import math

import numpy as np

SMOOTHING = 0.1


class ByteBigram:
    """Probability of a byte given the one before, counted on a text, with additive smoothing.

    Args:
        text: What to count, as bytes.
    """

    def __init__(self, text: bytes) -> None:
        counts = _pair_counts(text) + SMOOTHING
        self.log_probabilities = np.log(counts / counts.sum(1, keepdims=True))

    def bits_per_byte(self, text: bytes) -> float:
        """Average the bits that each byte after the first costs."""
        counts = _pair_counts(text)
        return float(-(counts * self.log_probabilities).sum() / counts.sum() / math.log(2))


def _pair_counts(text: bytes) -> np.ndarray:
    values = np.frombuffer(text, np.uint8).astype(np.int64)
    return np.bincount(values[:-1] * 256 + values[1:], minlength=2**16).reshape(256, 256).astype(np.float64)
