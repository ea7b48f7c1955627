"""Weights that are drawn late: a model too large for one process is built without any, sharded, and drawn in parts."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

_IS_DEFERRED = ContextVar("is_deferred", default=False)


class DrawsByModule(Protocol):
    """A model that can draw the weights of one of its modules at a time."""

    def init_module(self, name: str, module: nn.Module) -> None:
        """Draw what `module`, called `name` in the model, holds itself."""


@contextmanager
def deferred_weights() -> Iterator[None]:
    """Let models of the body that can be drawn by module be built on the meta device."""
    token = _IS_DEFERRED.set(True)
    try:
        yield
    finally:
        _IS_DEFERRED.reset(token)


def weights_device() -> str | None:
    """Where a model that can be drawn by module is to be built; None for the default device."""
    return "meta" if _IS_DEFERRED.get() else None


def draw_shards(model: DrawsByModule, device: torch.device) -> None:
    """Give a sharded model of the meta device its weights: the numbers that one process would draw.

    Every rank draws all of them, a module at a time, and keeps its shards.

    Args:
        model: Its parameters are DTensors on the meta device.
        device: Where the shards shall lie.
    """
    model.to_empty(device=device)
    for name, module in model.named_modules():
        shards = dict(module.named_parameters(recurse=False))
        for key, shard in shards.items():
            dtype = torch.float32 if shard.dtype == torch.float64 else shard.dtype  # widened since it was built
            module._parameters[key] = nn.Parameter(torch.empty(shard.shape, dtype=dtype))
        model.init_module(name, module)
        for key, shard in shards.items():
            _keep(shard, module._parameters[key].detach())
            module._parameters[key] = shard


def _keep(shard: DTensor, drawn: torch.Tensor) -> None:
    """Copy this rank's part of a tensor that all ranks have."""
    part = distribute_tensor(drawn, shard.device_mesh, shard.placements, src_data_rank=None)
    with torch.no_grad():
        shard.to_local().copy_(part.to_local())
