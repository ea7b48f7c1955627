"""Model FLOPs of a forward pass, and what a device could do: the two sides of model FLOPs utilisation."""

import copy
import time
from collections.abc import Iterable
from functools import partial

import torch
from lightning.fabric.utilities.throughput import get_available_flops
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dcmha import ComposedAttentionBase, attention_flops, compose_options_of, visible_pairs


def forward_flops(model: nn.Module, *example: object) -> int:
    """Count the FLOPs of a forward pass on an example, its arguments, of the meta device.

    Composed layers count as `dcmha.attention_flops` says, whichever implementation runs: pairs that causality or a
    window hides are left out, masks of the data are not. Torch counts the rest.
    """
    model = copy.deepcopy(model).to("meta").eval().requires_grad_(False)  # the counter wants no graph
    example = in_dtype(example, next(model.parameters()).dtype)
    counts: list[int] = []
    for module in model.modules():
        if isinstance(module, ComposedAttentionBase):
            module.attend = partial(_count, module, counts)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*example)
    return counter.get_total_flops() + sum(counts)


def in_dtype(args: Iterable[object], dtype: torch.dtype) -> tuple:
    """Cast those arguments that are floating tensors."""
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)


def _count(
    layer: ComposedAttentionBase, counts: list[int], q: Tensor, k: Tensor, v: Tensor, *_, is_causal: bool = False,
    window_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Add what a call of the operator costs, in place of making it."""
    B, H, T, D = q.shape
    pairs = B * visible_pairs(T, k.shape[2], is_causal=is_causal, window_size=window_size)
    counts.append(attention_flops(D, H, pairs, **compose_options_of(layer.options)))
    return torch.empty_like(q)


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
