"""Tensor parallelism: ranks compute their part of each layer, and sum at the end of a layer.

Ranks compute with plain tensors; DTensors describe their parts of the parameters to FSDP, to the optimizer, and to the
norm of the gradients.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from dcmha.parallel import ShardedDim

from .layout import WHOLE, RankShare, split_blocks


class TensorParallelPlan(NamedTuple):
    """How a model, already changed to compute a rank's share, is split.

    Attributes:
        splits: Split parameters by name.
        entered: Names of modules whose first argument is replicated and used by each rank for its share.
        styles: Parallel styles of torch, by module name.
    """

    splits: Mapping[str, ShardedDim]
    entered: Sequence[str]
    styles: Mapping[str, ParallelStyle]


def split_model(model: nn.Module, plan: TensorParallelPlan, mesh: DeviceMesh) -> None:
    """Split a model in place over a one-dimensional mesh. All ranks have the same weights, or meta tensors."""
    for name, module in list(model.named_modules()):
        prefix = f"{name}." if name else ""
        for key, parameter in module.named_parameters(recurse=False):
            module._parameters[key] = _split_parameter(parameter, plan.splits.get(prefix + key, WHOLE), mesh)
        if module._parameters and name not in plan.styles:
            _use_local_parameters(module, {k: plan.splits.get(prefix + k, WHOLE) for k in module._parameters})
    for name in plan.entered:
        model.get_submodule(name).register_forward_pre_hook(
            lambda module, args: (copy_to_ranks(args[0], mesh), *args[1:])
        )
    for name, style in plan.styles.items():
        parallelize_module(model.get_submodule(name), mesh, style)


def _split_parameter(whole: nn.Parameter, split: ShardedDim, mesh: DeviceMesh) -> nn.Parameter:
    blocks = split_blocks(whole.shape, split, RankShare(mesh.get_local_rank(), mesh.size()))
    local = torch.cat([block.of_whole(whole.detach()) for block in blocks], split.dim or 0)
    placement: Placement = Replicate() if split.dim is None else Shard(split.dim)
    part = DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())
    return nn.Parameter(part, requires_grad=whole.requires_grad)


def _use_local_parameters(module: nn.Module, splits: Mapping[str, ShardedDim]) -> None:
    """Make a module use this rank's parts, as plain tensors, in its forward pass."""
    gradients = {name: [Partial()] if split.is_summed else None for name, split in splits.items()}

    def show(module: nn.Module, args: tuple) -> None:
        for name, placements in gradients.items():
            if module._parameters[name] is not None:
                module.__dict__[name] = module._parameters[name].to_local(grad_placements=placements)

    def hide(module: nn.Module, args: tuple, output: Tensor) -> None:
        for name in gradients:
            module.__dict__.pop(name, None)

    module.register_forward_pre_hook(show)
    module.register_forward_hook(hide, always_call=True)


def copy_to_ranks(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Identity on a replicated tensor; in the backward pass the ranks' gradients are summed."""
    return DTensor.from_local(x, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
