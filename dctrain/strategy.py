"""FSDP2Strategy: weights, gradients and optimiser state sharded over all ranks, or over groups of them."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from .deferred import draw_shards
from .errors import UserError

HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def make_mesh(device_type: str, world: int, replicas: int) -> DeviceMesh:
    """Arrange ranks as [shards], or as [replicas, shards].

    Raises:
        UserError: If `replicas` does not divide the world.
    """
    if replicas < 1 or world % replicas:
        raise UserError(f"trainer.strategy.replicas={replicas} must be a divisor of the {world} ranks.")
    sizes = {"replicas": replicas, "shards": world // replicas}
    names = tuple(name for name in sizes if name == "shards" or sizes[name] > 1)
    return init_device_mesh(device_type, tuple(map(sizes.get, names)), mesh_dim_names=names)


def shard_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None
) -> None:
    """Shard a model in place, each block by itself, so that one block at a time is gathered."""
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())


class FSDP2Strategy(ModelParallelStrategy):
    """Shards over all ranks (`fully_shard`): `--trainer.strategy fsdp2`.

    Every rank takes its own part of the data. Under a mixed precision parameters are gathered in 16 bits and gradients
    reduced in 32, once a step: an accumulated step keeps whole gradients until then. Checkpoints are as those of one
    process.

    Args:
        replicas: Groups of ranks that each hold the whole model, sharded within (HSDP); 1 shards over all ranks. What
            is left of the world size is the ranks of a group.
    """

    def __init__(self, replicas: int = 1) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)
        self.replicas = replicas

    def setup_environment(self) -> None:
        """Connect the processes."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        self.mesh = make_mesh(self.root_device.type, self.world_size, self.replicas)

    def shard(self, model: nn.Module, blocks: Iterable[nn.Module], precision: str) -> None:
        """Shard a model in place, and draw its weights if it has none yet.

        Args:
            model: The network.
            blocks: Its blocks, each of which is gathered by itself.
            precision: The trainer's. Autocast says what a forward pass does in 32 bits; inputs stay as they come.
        """
        reduced = torch.float32 if "16" in precision else None
        policy = MixedPrecisionPolicy(HALVES.get(precision), reduced, cast_forward_inputs=False)
        shard_blocks(model, blocks, self.mesh, policy)
        if any(parameter.is_meta for parameter in model.parameters()):
            draw_shards(model, self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Reduce no gradients for the body, which is a batch whose step is still to come."""
        sharded = [module for module in self.lightning_module.children() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True)


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all ranks.")


def is_sharding(strategy: object) -> bool:
    """Tell whether a configured strategy, a name or a class with options, is FSDP2Strategy."""
    named = strategy if isinstance(strategy, str) or strategy is None else strategy.get("class_path")
    return named is not None and named.split(".")[-1] in ("fsdp2", FSDP2Strategy.__name__)


def check_strategy(strategy: str | type | Strategy) -> None:
    """Refuse a strategy that is none of one device, DDP and FSDP2: what others train would be something else.

    Args:
        strategy: One, its class, or its name; names that nobody knows are left to Lightning.

    Raises:
        UserError: If it is so.
    """
    kind = strategy if isinstance(strategy, type) else type(strategy)
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        kind = StrategyRegistry[strategy]["strategy"]
    if issubclass(kind, Strategy) and not issubclass(kind, SingleDeviceStrategy | DDPStrategy | FSDP2Strategy):
        raise UserError(
            f"trainer.strategy {kind.__name__} is not supported; accepted: auto, ddp, fsdp2, or, with options, "
            "FSDP2Strategy."
        )
