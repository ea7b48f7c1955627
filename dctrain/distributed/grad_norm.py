"""The norm of gradients of which ranks have parts."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate


def total_norm(gradients: list[Tensor]) -> Tensor:
    """Compute the 2-norm of all gradients together, a scalar, the same on all ranks.

    Of DTensors it takes one sum over the ranks; torch's own takes one for each tensor where tensors are split in
    different ways.

    Args:
        gradients: Of any shapes; tensors, or DTensors of one mesh of all ranks.
    """
    if not any(isinstance(gradient, DTensor) for gradient in gradients):
        return nn.utils.get_total_norm(gradients)
    counted = [gradient.to_local() for gradient in gradients if _is_counted_here(gradient)]
    square = nn.utils.get_total_norm(counted).to(gradients[0].device, torch.float64).square()
    dist.all_reduce(square)
    return square.sqrt().to(gradients[0].dtype)


def _is_counted_here(gradient: DTensor) -> bool:
    """Tell whether this rank is the first of those that have the same part."""
    mesh = gradient.device_mesh
    axes = [axis for axis, placement in enumerate(gradient.placements) if isinstance(placement, Replicate)]
    return all(mesh.get_local_rank(axis) == 0 for axis in axes)
