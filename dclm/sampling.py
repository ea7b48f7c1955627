"""Sampling of the next token from logits."""

# B batch, V vocabulary

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from dcmha.checks import check_integers

MAX_TEMPERATURE = 1e38  # range of float32
SMALLEST = 2.0**-149  # smallest positive float32


@dataclass(frozen=True)
class Sampling:
    """Sampling settings.

    Attributes:
        temperature: Divides the logits; 0 for greedy decoding.
        top_k: Sample among the top k tokens (including ties); None for all.
        top_p: Nucleus sampling: smallest set of top tokens whose probabilities sum to p; None for all.

    Raises:
        ValueError: If a value is out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        """Check the ranges."""
        if not isinstance(self.temperature, Real) or not 0 <= self.temperature < MAX_TEMPERATURE:
            raise ValueError(f"temperature={self.temperature!r} must be a number in [0, {MAX_TEMPERATURE:g}).")
        check_integers(may_be_none=True, top_k=self.top_k)
        if self.top_p is not None and not (isinstance(self.top_p, Real) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p={self.top_p!r} must be in (0, 1], or None.")

    def choose(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Sample a token [B] for each row of logits [B, V]."""
        if self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the sampling distribution [B, V], for a temperature above 0."""
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        logits = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, SMALLEST)
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        probabilities = logits.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return probabilities
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered
        kept = ordered.masked_fill(before >= max(self.top_p, SMALLEST), 0.0)
        return torch.zeros_like(probabilities).scatter(1, order, kept / kept.sum(-1, keepdim=True))
