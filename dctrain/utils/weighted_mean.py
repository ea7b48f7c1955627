"""WeightedMean: a mean over batches of any sizes, in which a NaN shows."""

import torch
from torch import Tensor
from torchmetrics import Metric


class WeightedMean(Metric):
    """Averages numbers by weights, over batches and ranks, in float64.

    torchmetrics' own mean either leaves NaN out or, told not to (`nan_strategy="disable"`), leaves the weights out.
    """

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("total", "weight"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, mean: Tensor, weight: float | Tensor) -> None:
        """Add the mean of a batch, and what it weighs: what it is the mean of."""
        self.total += mean.detach().double() * weight
        self.weight += weight

    def compute(self) -> Tensor:
        """Return the mean, float32; NaN of nothing."""
        return (self.total / self.weight).float()
