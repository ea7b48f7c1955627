"""FSDP2Strategy: sharding of weights, gradients and optimizer state (FSDP, HSDP), and tensor parallelism over heads."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from ..checkpointing.async_save import ShardedCheckpointWriter, open_checkpoint
from ..checkpointing.training_state import MODEL, local_shards, make_states, named_groups, set_groups
from ..errors import UserError
from .layout import HEADS, REPLICAS, SHARDS, Layout, RankShare
from .meta_init import init_shards
from .tensor_parallel import TensorParallelPlan, split_model

POPEN = "popen"  # Lightning's launcher in which each process runs the command again
HALVES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def mesh_axes(world: int, *, replicas: int = 1, tensor_parallel: int = 1) -> dict[str, int]:
    """Compute the sizes of the mesh axes; the shards axis has the ranks that replicas and heads leave.

    Raises:
        UserError: If the sizes do not divide the world.
    """
    sizes = {"replicas": replicas, "tensor_parallel": tensor_parallel}
    for name, size in sizes.items():
        if size < 1 or world % size:
            raise UserError(f"trainer.strategy.{name}={size} must be a divisor of the {world} ranks.")
    if world % (replicas * tensor_parallel):
        raise UserError(
            f"trainer.strategy.replicas={replicas} times tensor_parallel={tensor_parallel} must be a divisor of the "
            f"{world} ranks."
        )
    return {REPLICAS: replicas, SHARDS: world // (replicas * tensor_parallel), HEADS: tensor_parallel}


def make_mesh(device_type: str, axes: Mapping[str, int]) -> DeviceMesh:
    """Create the mesh [replicas, shards, heads]; axes of size 1, except shards, are omitted."""
    names = tuple(name for name, size in axes.items() if name == SHARDS or size > 1)
    return init_device_mesh(device_type, tuple(map(axes.get, names)), mesh_dim_names=names)


def shard_blocks(
    model: nn.Module, blocks: Iterable[nn.Module], mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None
) -> None:
    """Shard a model in place, each block separately, so that one block at a time is gathered."""
    mesh = mesh[tuple(axis for axis in mesh.mesh_dim_names if axis != HEADS)]
    for module in (*blocks, model):
        fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())


SplitsModel = Callable[[int, int], TensorParallelPlan]


def shard_model(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    precision: str,
    split: SplitsModel,
    device: torch.device,
) -> Layout:
    """Apply tensor parallelism and sharding in place, and initialize the weights of a model on the meta device.

    Args:
        model: The network.
        blocks: Its blocks, which are gathered separately.
        mesh: Mesh from `make_mesh`.
        precision: The trainer's precision. Autocast selects the operations in 32 bits; inputs are not cast.
        split: Changes the model to compute the share of a rank, given the number of ranks, and returns how it is split.
        device: Device of the shards.

    Returns:
        Layout of this rank.
    """
    splits = {}
    if HEADS in mesh.mesh_dim_names:
        plan = split(mesh.get_local_rank(HEADS), mesh[HEADS].size())
        split_model(model, plan, mesh[HEADS])
        splits = plan.splits
    layout = Layout(mesh, splits)
    reduced = torch.float32 if "16" in precision else None
    shard_blocks(model, blocks, mesh, MixedPrecisionPolicy(HALVES.get(precision), reduced, cast_forward_inputs=False))
    if any(parameter.is_meta for parameter in model.parameters()):
        init_shards(model, layout, device)
    return layout


class FSDP2Strategy(ModelParallelStrategy):
    """Shards over all ranks (`fully_shard`): `--trainer.strategy fsdp2`.

    With mixed precision, parameters are gathered in 16 bits and gradients reduced in 32 bits, once per step: with
    gradient accumulation full gradients are kept until then. A checkpoint is a folder to which each rank writes its
    shards; it can be resumed on any mesh, and by one process.

    Args:
        replicas: Number of replicas of the model, each sharded over its ranks (HSDP); 1 shards over all ranks.
        tensor_parallel: Number of consecutive ranks that split each layer by head groups (paper, section 3.2) and
            process the same data. The remaining factor of the world size is sharded; each shard processes its own data.
        async_save: Continue training while a checkpoint is written from a copy in host memory.
    """

    def __init__(self, replicas: int = 1, tensor_parallel: int = 1, async_save: bool = False) -> None:
        super().__init__(tensor_parallel_size=1)
        self.replicas, self.tensor_parallel = replicas, tensor_parallel
        self.folders = ShardedCheckpointWriter(async_save)

    def setup_environment(self) -> None:
        """Initialize the process group."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()
        axes = mesh_axes(self.world_size, replicas=self.replicas, tensor_parallel=self.tensor_parallel)
        self.mesh = make_mesh(self.root_device.type, axes)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """Number of ranks that the data are split over, and the index of this rank."""
        ranks = self.world_size // self.tensor_parallel
        return {"num_replicas": ranks, "rank": self.global_rank // self.tensor_parallel}

    def shard(self, model: nn.Module, blocks: Iterable[nn.Module], precision: str, split: SplitsModel) -> None:
        """Apply tensor parallelism and sharding in place; arguments as in `shard_model`."""
        self.layout = shard_model(model, blocks, self.mesh, precision, split, self.root_device)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Skip the reduction of gradients in the body, a batch before the last of an accumulated step."""
        sharded = [module for module in self.lightning_module.children() if isinstance(module, FSDPModule)]
        for module in sharded:
            module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for module in sharded:
                module.set_requires_gradient_sync(True)

    def lightning_module_state_dict(self) -> dict[str, torch.Tensor]:
        """Return nothing, as `save_checkpoint` saves the weights; free those gathered by a validation."""
        for module in self.lightning_module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        return {}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, list[dict]]:
        """Return nothing, as `save_checkpoint` saves the optimizer's tensors."""
        optimizer = getattr(optimizer, "_optimizer", optimizer)
        return {"param_groups": named_groups(self.lightning_module, optimizer)}

    def save_checkpoint(self, checkpoint: dict, filepath: str | Path, storage_options: object = None) -> None:
        """Save the folder `filepath`: each rank writes its shards. An error of one rank is raised on all."""
        optimizer = self.optimizers[0] if "optimizer_states" in checkpoint else None
        self.folders.save(Path(filepath), local_shards(self.lightning_module, optimizer, self.layout), checkpoint)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove a checkpoint, after pending saves are finished."""
        self.folders.finish()
        super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict:
        """Load the shards of weights and optimizer from a single-file or sharded checkpoint; return its other
        content."""
        module, optimizer = self.lightning_module, next(iter(self.optimizers), None)
        groups = [] if optimizer is None else named_groups(module, optimizer)
        stored = open_checkpoint(Path(checkpoint_path), groups)
        of_model = {name.removeprefix(MODEL): s for name, s in stored.shapes.items() if name.startswith(MODEL)}
        module.check_architecture(of_model, stored.meta.get("hyper_parameters", {}))
        if optimizer is not None:
            make_states(module, optimizer, stored.shapes)
            set_groups(optimizer, stored.groups)
        stored.fill(local_shards(module, optimizer, self.layout))
        return stored.meta

    def teardown(self) -> None:
        """Finish pending saves, and tear down."""
        self.folders.finish()
        super().teardown()

    def training_step(self, *args, **kwargs) -> STEP_OUTPUT:
        """Run a training step; with a split vocabulary the loss is computed in parts."""
        with loss_parallel():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args, **kwargs) -> STEP_OUTPUT:
        """Run a validation step, likewise."""
        with loss_parallel():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args, **kwargs) -> STEP_OUTPUT:
        """Run a test step, likewise."""
        with loss_parallel():
            return super().test_step(*args, **kwargs)

    def backward(self, *args, **kwargs) -> torch.Tensor:
        """Run the backward pass, likewise."""
        with loss_parallel():
            return super().backward(*args, **kwargs)


StrategyRegistry.register("fsdp2", FSDP2Strategy, description="FSDP2 over all ranks.")


def data_rank(trainer: L.Trainer | None) -> RankShare:
    """Return the part of the data that this process trains on, and the number of parts."""
    split = None if trainer is None else trainer.distributed_sampler_kwargs
    return RankShare(0, 1) if split is None else RankShare(split["rank"], split["num_replicas"])


def is_sharding(strategy: object) -> bool:
    """Whether a configured strategy, a name or a class with options, is FSDP2Strategy."""
    named = strategy if isinstance(strategy, str) or strategy is None else strategy.get("class_path")
    return named is not None and named.split(".")[-1] in ("fsdp2", FSDP2Strategy.__name__)


def check_strategy(strategy: str | type | Strategy) -> None:
    """Check that a strategy is a single device, DDP or FSDP2; others would train differently.

    Args:
        strategy: A strategy, its class, or its name. Unknown names are left to Lightning.

    Raises:
        UserError: If the strategy is not supported.
    """
    kind = strategy if isinstance(strategy, type) else type(strategy)
    start = getattr(strategy, "_start_method", POPEN)
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        kind = StrategyRegistry[strategy]["strategy"]
        start = StrategyRegistry[strategy]["init_params"].get("start_method", POPEN)
    known = SingleDeviceStrategy | DDPStrategy | FSDP2Strategy
    is_known = not issubclass(kind, Strategy) or (issubclass(kind, known) and not issubclass(kind, DeepSpeedStrategy))
    if not is_known or start != POPEN:
        name = strategy if isinstance(strategy, str) else kind.__name__
        how = f" with start_method={start!r}, whose processes do not parse the command line," if is_known else ""
        raise UserError(
            f"trainer.strategy {name}{how} is not supported; expected auto, ddp, fsdp2, or, with options, "
            "FSDP2Strategy."
        )
