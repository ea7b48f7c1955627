"""Model FLOPs of a forward pass, and peak FLOP/s of a device, for model FLOPs utilization."""

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
    """Count the FLOPs of a forward pass for example arguments on the meta device.

    Composed layers count as in `dcmha.attention_flops`, independent of the implementation: pairs hidden by causality or
    a window are not counted, pairs hidden by data-dependent masks are. Other operations are counted by torch.
    """
    model = copy.deepcopy(model).to("meta").eval().requires_grad_(False)  # the counter needs no graph
    example = in_dtype(example, next(model.parameters()).dtype)
    counts: list[int] = []
    for module in model.modules():
        if isinstance(module, ComposedAttentionBase):
            module.attend = partial(_count, module, counts)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*example)
    return counter.get_total_flops() + sum(counts)


def in_dtype(args: Iterable[object], dtype: torch.dtype) -> tuple:
    """Cast the floating tensors among arguments."""
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)


def _count(
    layer: ComposedAttentionBase, counts: list[int], q: Tensor, k: Tensor, v: Tensor, *_, is_causal: bool = False,
    window_size: int | None = None,
) -> Tensor:  # fmt: skip
    """Add the cost of an operator call instead of executing it."""
    B, H, T, D = q.shape
    pairs = B * visible_pairs(T, k.shape[2], is_causal=is_causal, window_size=window_size)
    counts.append(attention_flops(D, H, pairs, **compose_options_of(layer.options)))
    return torch.empty_like(q)


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the peak FLOP/s of a device in a dtype: from the data sheet of a known GPU, else measured."""
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
