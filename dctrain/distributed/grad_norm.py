"""Norm of sharded gradients."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Compute the total 2-norm of all gradients, a scalar, equal on all ranks.

    DTensors need a single all-reduce; `torch.nn.utils.get_total_norm` needs one per tensor if placements differ.

    Args:
        gradients: Tensors, or DTensors on one mesh of all ranks, of any shapes.
    """
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    counted = [gradient.to_local() for gradient in gradients if _is_counted_here(gradient)]
    square = nn.utils.get_total_norm(counted).to(gradients[0].device, torch.float64).square()
    dist.all_reduce(square)
    return square.sqrt().to(gradients[0].dtype)


def _is_counted_here(gradient: DTensor) -> bool:
    """Whether this rank is the first of those with the same shard."""
    mesh = gradient.device_mesh
    axes = [axis for axis, placement in enumerate(gradient.placements) if isinstance(placement, Replicate)]
    return all(mesh.get_local_rank(axis) == 0 for axis in axes)
