"""Initialization of large models: built on the meta device, sharded, and then initialized shard by shard."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor, nn

from .layout import Layout

_IS_META = ContextVar("is_deferred", default=False)


class ModulewiseInit(Protocol):
    """A model that can initialize one of its modules at a time."""

    def init_module(self, name: str, module: nn.Module) -> None:
        """Initialize the direct parameters of `module`, whose name in the model is `name`."""


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Build models that support `ModulewiseInit` on the meta device within the body."""
    token = _IS_META.set(True)
    try:
        yield
    finally:
        _IS_META.reset(token)


def weights_device() -> str | None:
    """Device to build `ModulewiseInit` models on; None for the default device."""
    return "meta" if _IS_META.get() else None


def init_shards(model: ModulewiseInit, layout: Layout, device: torch.device) -> None:
    """Initialize a sharded model on the meta device with the same values as in one process.

    Every rank initializes one full module at a time, and keeps its shards.

    Args:
        model: Model whose parameters are DTensors on the meta device.
        layout: Layout of this rank.
        device: Device of the initialized shards.
    """
    model.to_empty(device=device)
    for name, module in model.named_modules():
        parts = dict(module.named_parameters(recurse=False))
        for key, part in parts.items():
            dtype = torch.float32 if part.dtype == torch.float64 else part.dtype  # converted after the model was built
            module._parameters[key] = nn.Parameter(torch.empty(part.shape, dtype=dtype))
        model.init_module(name, module)
        for key, part in parts.items():
            drawn = module._parameters[key].detach()
            local = part.detach().to_local()
            for block in layout.blocks(f"{name}.{key}" if name else key, drawn.shape):
                block.of_local(local).copy_(block.of_whole(drawn))
            module._parameters[key] = part


@torch.no_grad()
def load_shards(model: nn.Module, layout: Layout, weights: Mapping[str, Tensor]) -> None:
    """Copy a rank's parts of full tensors into a sharded model; parameters without an entry are unchanged."""
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        local = parameters[name].to_local()
        for block in layout.blocks(name, weight.shape):
            block.of_local(local).copy_(block.of_whole(weight))
