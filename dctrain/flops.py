"""Model FLOPs of a forward pass, and what a device could do: the two sides of model FLOPs utilisation."""

import copy
import time

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dcmha import DCAttention, DCCrossAttention


def forward_flops(model: nn.Module, example: torch.Tensor) -> int:
    """Count the matrix FLOPs (two per multiply-add) of a forward pass on an example of the meta device.

    Composed attention is counted as the dense reference does it, whichever implementation runs.
    """
    model = copy.deepcopy(model).to("meta").eval().requires_grad_(False)  # the counter wants no graph
    example = example.to(next(model.parameters()).dtype) if example.is_floating_point() else example
    for module in model.modules():
        if isinstance(module, DCAttention | DCCrossAttention):
            module.impl = "reference"
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(example)
    return counter.get_total_flops()


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s a device can reach in a dtype: a known GPU's data sheet, else measured on a product."""
    if device.type == "cuda":
        known = get_available_flops(device, dtype)
        if known:
            return float(known)
    return _measured_flops(device, dtype)


def _measured_flops(device: torch.device, dtype: torch.dtype, size: int = 1024, repeats: int = 5) -> float:
    a = torch.randn(size, size, device=device, dtype=dtype)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        (a @ a)[0, 0].item()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)
