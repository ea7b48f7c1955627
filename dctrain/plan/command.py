"""`plan`: memory, time and cost of a run with the arguments of `fit`, computed without a device."""

import re
from pydoc import locate
from typing import NamedTuple

import torch
from lightning.fabric.utilities.seed import max_seed_value, min_seed_value
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.strategies import StrategyRegistry

from ..checkpointing.checkpoint import LATEST, find_checkpoint
from ..cli.trainer_args import check_trainer
from ..data.datamodule import ResumableDataModule
from ..distributed.layout import HEADS, REPLICAS, SHARDS
from ..distributed.meta_init import on_meta_device
from ..distributed.strategy import check_strategy, is_sharding, mesh_axes
from ..errors import UserError, as_user_error, reason
from ..run_length import is_set
from ..training_module import TrainingModule
from .flops import forward_flops
from .length import PEAK_TFLOPS, Length, count_steps, describe_time, measured_speed, stated_speed
from .memory import GIB, Memory, activation_bytes, check_fits, ddp_memory, fsdp2_memory, rank_share

AUTO = "auto"
PRECISIONS = (None, 32, "32", "32-true", "bf16-mixed", "16-mixed")
ADAM_CHECKPOINT_BYTES = 12  # per parameter: itself and two moments, in 32 bits


class PlanCLI:
    """Mixin before a `TrainerCLI` among the bases: plans the run instead of starting it."""

    def add_subcommand_arguments(self, parser, subcommand: str) -> None:
        """Add the options of the estimate."""
        super().add_subcommand_arguments(parser, subcommand)
        for name, kind, default, help_text in OPTIONS:
            parser.add_argument(f"--{name}", type=kind, default=default, help=help_text)

    def set_seed(self) -> None:
        """Check the seed without setting it.

        Raises:
            UserError: If it is out of range.
        """
        seed = self.setting("seed_everything")
        if type(seed) is int and not min_seed_value <= seed <= max_seed_value:
            raise UserError(f"seed_everything={seed}: expected {min_seed_value} to {max_seed_value}.")

    def instantiate_classes(self) -> None:
        """Build only the model, without weights if possible."""
        self.check_named()
        resume = self.setting("resume")
        if resume not in (None, LATEST):
            find_checkpoint(resume)
        model = self.setting("model")
        with on_meta_device():
            self.module = self.model_class(**model)

    def run_subcommand(self, subcommand: str) -> None:
        """Print the plan."""
        trainer, data = self.setting("trainer"), self.setting("data")
        estimate = Estimate(**{name: self.setting(name) for name in Estimate._fields})
        num_samples = estimate.train_samples
        datamodule = self.datamodule_class(**data)
        if num_samples is None and is_set(trainer["max_epochs"]):
            num_samples = _count_samples(datamodule)
        gpu_memory = self.setting("gpu_memory")
        print("\n".join(plan(self.module, trainer, data.batch_size, gpu_memory, num_samples, estimate)))


def _count_samples(datamodule: ResumableDataModule) -> int | None:
    """Count the samples of the training set; None, and a message, if it cannot be opened on this machine."""
    try:
        return datamodule.count_samples()
    except (UserError, OSError) as error:
        print(f"the size of the training set is unknown: {reason(error)}")
        return None


class Estimate(NamedTuple):
    """Options of `plan` for the length, time and price of a run; see `OPTIONS`."""

    train_samples: int | None = None
    mfu: float | None = None
    peak_tflops: float = PEAK_TFLOPS
    throughput: str | None = None
    hour_price: float | None = None


OPTIONS = (
    ("gpu_memory", float, 80.0, "Memory of a device, in GiB."),
    ("train_samples", int | None, None, "Samples (images, sequences) of the training set; counted by default."),
    ("mfu", float | None, None, "Model FLOPs utilization for the time estimate, in (0, 1]."),
    ("peak_tflops", float, PEAK_TFLOPS, "Peak TFLOP/s of a device for --mfu; default: H100, dense bfloat16."),
    ("throughput", str | None, None, "Folder of a run whose measured speed is used for the time estimate."),
    ("hour_price", float | None, None, "Price per device and hour."),
)


def plan(
    module: TrainingModule,
    trainer: dict,
    batch_size: int,
    gpu_memory: float,
    num_samples: int | None,
    estimate: Estimate,
) -> list[str]:
    """Compute the requirements of a run, as lines of text.

    Args:
        module: The module; its model may be on the meta device.
        trainer: The trainer's arguments.
        batch_size: Samples per rank and batch.
        gpu_memory: Memory of a device, in GiB.
        num_samples: Samples of the training set; None if unknown.
        estimate: Options for time and price.

    Raises:
        UserError: If the mesh does not divide the ranks, the run exceeds the device's memory, or a number is out of
            range.
    """
    check_trainer(trainer)
    _check_planned(trainer, gpu_memory, estimate)
    devices, nodes, accumulate = _devices(trainer), trainer["num_nodes"], trainer["accumulate_grad_batches"]
    world, model = devices * nodes, module.model
    example, _, units_of_one = module.example(1)
    axes, units = _mesh(trainer["strategy"], world), batch_size * units_of_one
    numel = sum(parameter.numel() for parameter in model.parameters())
    flops = forward_flops(model, *example) // units_of_one
    memory = plan_memory(module, trainer, batch_size, axes)
    data_ranks = world // axes[HEADS]
    step = units * accumulate * data_ranks
    steps = count_steps(trainer, num_samples, batch_size * data_ranks)
    epochs = None if is_set(trainer["max_steps"]) else trainer["max_epochs"]
    length = Length(steps, step, module.speed_unit, flops, epochs)
    lines = [
        f"model       {module.hparams['model']}, {numel:,} parameters",
        f"mesh        {world} ranks ({nodes} x {devices}), {_mesh_name(trainer['strategy'], axes)}",
        f"step        {step:,} {module.speed_unit} ({units:,} x {accumulate} accumulated x {data_ranks} ranks)",
        f"run         {length}",
        *([] if trainer["max_time"] is None else [f"            or until max_time={trainer['max_time']}"]),
        *_time(length, world, estimate),
        "rank        " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory._asdict().items()) + " GiB",
        f"            about {memory.total / GIB:.1f} of {gpu_memory:g} GiB, plus temporary tensors",
        f"checkpoint  {ADAM_CHECKPOINT_BYTES * numel / GIB:.1f} GiB",
    ]
    if str(trainer["devices"]) == AUTO:
        lines.append(f"devices     {AUTO}: planned for one; set --trainer.devices for more")
    check_fits(memory, gpu_memory)
    return lines


def _devices(trainer: dict) -> int:
    """Return the devices per node; "auto", which depends on the machine, counts as one.

    Raises:
        UserError: If it is not a number.
    """
    devices = str(trainer["devices"])
    if devices == AUTO:
        return 1
    if not re.fullmatch(r"0*[1-9]\d{0,8}", devices, re.ASCII):
        raise UserError(f"trainer.devices={devices!r}: expected a number of at least 1, or {AUTO!r}.")
    return int(devices)


def _time(length: Length, world: int, estimate: Estimate) -> list[str]:
    """Format the time, if requested."""
    if estimate.mfu is None and estimate.throughput is None:
        return []
    if length.steps is None:
        raise UserError("train_samples=None: expected the size of the training set, which is not available here.")
    if estimate.mfu is not None:
        speed = stated_speed(estimate.mfu, estimate.peak_tflops)
    else:
        speed = measured_speed(estimate.throughput)
    return [f"time        {describe_time(length, world, speed, estimate.hour_price)}"]


def _check_planned(trainer: dict, gpu_memory: float, estimate: Estimate) -> None:
    """Check the options of a plan.

    Raises:
        UserError: If an option is invalid.
    """
    strategy = trainer["strategy"]
    with as_user_error(f"trainer.max_time={trainer['max_time']!r}"):
        Timer(trainer["max_time"])
    numbers = {"trainer.num_nodes": trainer["num_nodes"], "gpu_memory": gpu_memory}
    for name, number in numbers.items():
        if not number > 0:
            raise UserError(f"{name}={number} must be positive.")
    if estimate.train_samples is not None and estimate.train_samples < 1:
        raise UserError(f"train_samples={estimate.train_samples}: expected at least 1.")
    if trainer.get("fast_dev_run"):
        raise UserError(f"trainer.fast_dev_run={trainer['fast_dev_run']}: plan does not support it; remove it.")
    if estimate.mfu is None and estimate.peak_tflops != PEAK_TFLOPS:
        raise UserError(f"peak_tflops={estimate.peak_tflops}: expected --mfu with it.")
    if estimate.mfu is not None and estimate.throughput is not None:
        raise UserError(f"mfu={estimate.mfu} and throughput={estimate.throughput!r}: expected one of the two.")
    if estimate.hour_price is not None and estimate.mfu is None and estimate.throughput is None:
        raise UserError(f"hour_price={estimate.hour_price}: expected --mfu or --throughput with it.")
    if trainer["precision"] not in PRECISIONS:
        raise UserError(f"trainer.precision={trainer['precision']!r}; expected 32-true, bf16-mixed, 16-mixed.")
    if isinstance(strategy, str) and strategy != "auto" and strategy not in StrategyRegistry:
        raise UserError(f"trainer.strategy={strategy!r} is unknown; expected auto, ddp, fsdp2.")
    check_strategy(strategy if isinstance(strategy, str) else locate(strategy["class_path"]))


def plan_memory(module: TrainingModule, trainer: dict, batch_size: int, axes: dict[str, int]) -> Memory:
    """Estimate the memory of a rank."""
    is_mixed = "16" in str(trainer["precision"] or "32")
    if axes[HEADS] > 1:
        module = rank_share(module, axes[HEADS])
    model = module.model
    args, kwargs, _ = module.example(batch_size)
    dtype, recompute = torch.bfloat16 if is_mixed else torch.float32, module.hparams.recompute
    activations = activation_bytes(model, args, kwargs, dtype, recompute)
    if not is_sharding(trainer["strategy"]):
        return ddp_memory(model, activations, is_mixed=is_mixed, world=axes[SHARDS])
    accumulate = trainer["accumulate_grad_batches"]
    return fsdp2_memory(model, activations, is_mixed=is_mixed, shards=axes[SHARDS], accumulate=accumulate)


def _mesh(strategy: object, world: int) -> dict[str, int]:
    """Return the mesh axes of a configured strategy; by default all ranks are shards."""
    options = {} if strategy is None or isinstance(strategy, str) else strategy.get("init_args") or {}
    return mesh_axes(world, **{name: options.get(name, 1) for name in ("replicas", "tensor_parallel")})


def _mesh_name(strategy: object, axes: dict[str, int]) -> str:
    if not is_sharding(strategy):
        return "each with the full model"
    parts = [f"{axes[SHARDS]} shards"]
    if axes[HEADS] > 1:
        parts.append(f"of {axes[HEADS]} tensor-parallel ranks")
    if axes[REPLICAS] > 1:
        parts.append(f"in {axes[REPLICAS]} replicas")
    return " ".join(parts)
