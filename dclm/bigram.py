"""A byte-bigram model, a simple baseline for language models."""

import math

import numpy as np

SMOOTHING = 0.1


class ByteBigram:
    """Probability of a byte given the previous one, with additive smoothing.

    Args:
        text: Training text, as bytes.
    """

    def __init__(self, text: bytes) -> None:
        counts = _pair_counts(text) + SMOOTHING
        self.log_probabilities = np.log(counts / counts.sum(1, keepdims=True))

    def bits_per_byte(self, text: bytes) -> float:
        """Return the mean bits per byte, without the first byte."""
        counts = _pair_counts(text)
        return float(-(counts * self.log_probabilities).sum() / counts.sum() / math.log(2))


def _pair_counts(text: bytes) -> np.ndarray:
    values = np.frombuffer(text, np.uint8).astype(np.int64)
    return np.bincount(values[:-1] * 256 + values[1:], minlength=2**16).reshape(256, 256).astype(np.float64)
