"""State of model and optimizer as named tensors, of a rank or of a full checkpoint.

Names are `state_dict.KEY` and, for the optimizer, `optimizer_states.PARAMETER.KEY`. In a single-process checkpoint the
optimizer's parameters are numbered; in a sharded one they are named in its groups.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..distributed.layout import Layout
from .sharded import LocalShard, as_local_shard

MODEL, OPTIMIZER = "state_dict.", "optimizer_states."
NETWORK = "model."  # prefix of the sharded network within the module


def local_shards(module: nn.Module, optimizer: Optimizer | None, layout: Layout) -> dict[str, LocalShard]:
    """Return this rank's shards of a module and of its optimizer, by name."""
    parts = {f"{MODEL}{key}": _part(key, x, layout) for key, x in module.state_dict().items()}
    if optimizer is not None:
        for name, states in _named_states(module, optimizer):
            parts |= {f"{OPTIMIZER}{name}.{key}": _part(name, x, layout) for key, x in states.items()}
    return parts


def _part(name: str, x: Tensor, layout: Layout) -> LocalShard:
    if not isinstance(x, DTensor):
        return as_local_shard(x.detach())
    return LocalShard(x.detach().to_local(), x.shape, layout.blocks(name.removeprefix(NETWORK), x.shape))


def _named_states(module: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, dict[str, Tensor]]]:
    for name, parameter in module.named_parameters():
        if parameter in optimizer.state:
            yield name, optimizer.state[parameter]


def make_states(module: nn.Module, optimizer: Optimizer, stored: Mapping[str, torch.Size]) -> None:
    """Allocate the optimizer states that a checkpoint has.

    Args:
        module: The module.
        optimizer: Its optimizer.
        stored: Names and shapes in the checkpoint.
    """
    optimizer.state.clear()
    parameters = dict(module.named_parameters())
    fused = {parameter: group["fused"] for group in optimizer.param_groups for parameter in group["params"]}
    for full in filter(_is_of_optimizer, stored):
        name, key = _name_and_key(full)
        parameter = parameters[name]
        has_its_shape = stored[full] == parameter.shape
        device = parameter.device if fused[parameter] else "cpu"
        empty = torch.zeros_like(parameter) if has_its_shape else torch.zeros(stored[full], device=device)
        optimizer.state[parameter][key] = empty.detach()


def _is_of_optimizer(full: str) -> bool:
    return full.startswith(OPTIMIZER)


def _name_and_key(full: str) -> list[str]:
    """Split `optimizer_states.PARAMETER.KEY`."""
    return full.removeprefix(OPTIMIZER).rsplit(".", 1)


def named_groups(module: nn.Module, optimizer: Optimizer) -> list[dict]:
    """Copy the optimizer's groups with parameter names in place of parameters."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [group | {"params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]


def set_groups(optimizer: Optimizer, groups: list[dict]) -> None:
    """Restore the settings of groups, except their parameters and the device-dependent choice of kernels."""
    for group, stored in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in stored.items() if key not in ("params", "fused", "foreach")})


def flatten(checkpoint: dict, groups: list[dict]) -> dict[str, Tensor]:
    """Return the tensors of a single-process checkpoint by name.

    Args:
        checkpoint: Content of the checkpoint.
        groups: Result of `named_groups` for the same parameters in the same order.
    """
    tensors = {f"{MODEL}{key}": x for key, x in checkpoint["state_dict"].items()}
    names = [name for group in groups for name in group["params"]]
    for optimizer in checkpoint.get("optimizer_states", ()) if names else ():
        for number, states in optimizer["state"].items():
            tensors |= {f"{OPTIMIZER}{names[number]}.{key}": x for key, x in states.items()}
    return tensors


def unflatten(tensors: Mapping[str, Tensor], groups: list[dict]) -> dict:
    """Convert named tensors to model and optimizer states of a single-process checkpoint.

    Args:
        tensors: Tensors by name.
        groups: Result of `named_groups`.
    """
    number_of = {name: i for i, name in enumerate(name for group in groups for name in group["params"])}
    states: dict[int, dict[str, Tensor]] = {}
    for full in filter(_is_of_optimizer, tensors):
        name, key = _name_and_key(full)
        states.setdefault(number_of[name], {})[key] = tensors[full]
    numbered = [group | {"params": [number_of[name] for name in group["params"]]} for group in groups]
    return {
        "state_dict": {full.removeprefix(MODEL): x for full, x in tensors.items() if full.startswith(MODEL)},
        "optimizer_states": [{"state": states, "param_groups": numbered}],
    }
