"""WeightedMean: a mean over batches of different sizes that propagates NaN."""

import torch
from torch import Tensor
from torchmetrics import Metric


class WeightedMean(Metric):
    """Weighted mean over batches and ranks, in float64.

    `torchmetrics.MeanMetric` either ignores NaN or, with `nan_strategy="disable"`, ignores the weights.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "weight"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, mean: Tensor, weight: float | Tensor) -> None:
        """Add the mean of a batch with its weight, the number of averaged elements."""
        self.total += mean.detach().double() * weight
        self.weight += weight

    def compute(self) -> Tensor:
        """Return the mean, float32; NaN without data."""
        return (self.total / self.weight).float()
