"""Weights that are drawn late: a model too large for one process is built without any, sharded, and drawn in parts."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor, nn

from .layout import Layout

_IS_META = ContextVar("is_deferred", default=False)


class ModulewiseInit(Protocol):
    """A model that can draw the weights of one of its modules at a time."""

    def init_module(self, name: str, module: nn.Module) -> None:
        """Draw what `module`, called `name` in the model, holds itself."""


@contextmanager
def on_meta_device() -> Iterator[None]:
    """Let models of the body that can be drawn by module be built on the meta device."""
    token = _IS_META.set(True)
    try:
        yield
    finally:
        _IS_META.reset(token)


def weights_device() -> str | None:
    """Where a model that can be drawn by module is to be built; None for the default device."""
    return "meta" if _IS_META.get() else None


def init_shards(model: ModulewiseInit, layout: Layout, device: torch.device) -> None:
    """Give a sharded model of the meta device its weights: the numbers that one process would draw.

    Every rank draws all of them, a module at a time, and keeps its parts.

    Args:
        model: Its parameters are DTensors on the meta device.
        layout: Which parts this rank has.
        device: Where they shall lie.
    """
    model.to_empty(device=device)
    for name, module in model.named_modules():
        parts = dict(module.named_parameters(recurse=False))
        for key, part in parts.items():
            dtype = torch.float32 if part.dtype == torch.float64 else part.dtype  # widened since it was built
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
    """Copy a rank's parts of whole tensors into a sharded model; parameters that are not named stay as they are."""
    parameters = dict(model.named_parameters())
    for name, weight in weights.items():
        local = parameters[name].to_local()
        for block in layout.blocks(name, weight.shape):
            block.of_local(local).copy_(block.of_whole(weight))
