"""`plan`: the arguments of `fit`, and what that run would need, on no device at all."""

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
ADAM_CHECKPOINT_BYTES = 12  # of a parameter: itself and two moments, in 32 bits


class PlanCLI:
    """Makes a command line of `TrainerCLI`, given before it among the bases, plan what it would run."""

    def _prepare_subcommand_parser(self, klass, subcommand: str, **kwargs):
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        for name, kind, default, said in OPTIONS:
            parser.add_argument(f"--{name}", type=kind, default=default, help=said)
        return parser

    def _set_seed(self) -> None:
        """Check the seed alone: nothing is drawn.

        Raises:
            UserError: If it is out of range.
        """
        seed = self._get(self.config, "seed_everything")
        if type(seed) is int and not min_seed_value <= seed <= max_seed_value:
            raise UserError(f"seed_everything={seed}: expected {min_seed_value} to {max_seed_value}.")

    def instantiate_classes(self) -> None:
        """Build the model alone, without weights where that is possible."""
        self.check_named()
        resume = self._get(self.config, "resume")
        if resume not in (None, LATEST):
            find_checkpoint(resume)
        model = self._get(self.config, "model")
        with on_meta_device():
            self.module = self._model_class(**model)

    def _run_subcommand(self, subcommand: str) -> None:
        trainer, data = self._get(self.config, "trainer"), self._get(self.config, "data")
        estimate = Estimate(**{name: self._get(self.config, name) for name in Estimate._fields})
        num_samples = estimate.train_samples
        datamodule = self._datamodule_class(**data)
        if num_samples is None and is_set(trainer["max_epochs"]):
            num_samples = _count_samples(datamodule)
        gpu_memory = self._get(self.config, "gpu_memory")
        print("\n".join(plan(self.module, trainer, data.batch_size, gpu_memory, num_samples, estimate)))


def _count_samples(datamodule: ResumableDataModule) -> int | None:
    """Count the samples of the training set; None, and a message, if it cannot be opened on this machine."""
    try:
        return datamodule.count_samples()
    except (UserError, OSError) as error:
        print(f"the training set is not counted: {reason(error)}")
        return None


class Estimate(NamedTuple):
    """Options of `plan` for the length, the time and the price of a run; see `OPTIONS`."""

    train_samples: int | None = None
    mfu: float | None = None
    peak_tflops: float = PEAK_TFLOPS
    throughput: str | None = None
    hour_price: float | None = None


OPTIONS = (
    ("gpu_memory", float, 80.0, "Of a device, in GiB."),
    ("train_samples", int | None, None, "Samples (images, sequences) of the training set; counted if left out."),
    ("mfu", float | None, None, "Model FLOPs utilisation that the time is estimated from, in (0, 1]."),
    ("peak_tflops", float, PEAK_TFLOPS, "Peak of a device for --mfu; the default is an H100's in dense bfloat16."),
    ("throughput", str | None, None, "Folder of a run whose measured speed the time is estimated from."),
    ("hour_price", float | None, None, "Price of a device and hour."),
)


def plan(
    module: TrainingModule,
    trainer: dict,
    batch_size: int,
    gpu_memory: float,
    num_samples: int | None,
    estimate: Estimate,
) -> list[str]:
    """Compute what a run will need, a line each.

    Args:
        module: The model may be on the meta device.
        trainer: The trainer's arguments.
        batch_size: Samples of a rank and batch.
        gpu_memory: Of a device, in GiB.
        num_samples: Samples of the training set; None if it is not known.
        estimate: Options for the time and the price.

    Raises:
        UserError: If the mesh does not fit the world, the run the device, or a number is out of range.
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
        *([] if trainer["max_time"] is None else [f"            or what is done in max_time={trainer['max_time']}"]),
        *_time(length, world, estimate),
        "rank        " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory._asdict().items()) + " GiB",
        f"            about {memory.total / GIB:.1f} of {gpu_memory:g} GiB, and what lives for a moment",
        f"checkpoint  {ADAM_CHECKPOINT_BYTES * numel / GIB:.1f} GiB",
    ]
    if str(trainer["devices"]) == AUTO:
        lines.append(f"devices     {AUTO}: planned for one; --trainer.devices plans for more")
    check_fits(memory, gpu_memory)
    return lines


def _devices(trainer: dict) -> int:
    """Read the devices of a node; "auto", which depends on the machine, counts as one.

    Raises:
        UserError: If they are no number.
    """
    devices = str(trainer["devices"])
    if devices == AUTO:
        return 1
    if not re.fullmatch(r"0*[1-9]\d{0,8}", devices, re.ASCII):
        raise UserError(f"trainer.devices={devices!r}: expected a number of at least 1, or {AUTO!r}.")
    return int(devices)


def _time(length: Length, world: int, estimate: Estimate) -> list[str]:
    """Write the line of the time, if it is asked for."""
    if estimate.mfu is None and estimate.throughput is None:
        return []
    if length.steps is None:
        raise UserError("train_samples=None: expected the size of the training set, which is not on this machine.")
    if estimate.mfu is not None:
        speed = stated_speed(estimate.mfu, estimate.peak_tflops)
    else:
        speed = measured_speed(estimate.throughput)
    return [f"time        {describe_time(length, world, speed, estimate.hour_price)}"]


def _check_planned(trainer: dict, gpu_memory: float, estimate: Estimate) -> None:
    """Check what a plan alone depends on.

    Raises:
        UserError: If it cannot be planned with.
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
        raise UserError(f"trainer.fast_dev_run={trainer['fast_dev_run']}: plan takes whole runs; leave it out.")
    if estimate.mfu is None and estimate.peak_tflops != PEAK_TFLOPS:
        raise UserError(f"peak_tflops={estimate.peak_tflops}: expected --mfu with it.")
    if estimate.mfu is not None and estimate.throughput is not None:
        raise UserError(f"mfu={estimate.mfu} and throughput={estimate.throughput!r}: expected one of the two.")
    if estimate.hour_price is not None and estimate.mfu is None and estimate.throughput is None:
        raise UserError(f"hour_price={estimate.hour_price}: expected --mfu or --throughput with it.")
    if trainer["precision"] not in PRECISIONS:
        raise UserError(f"trainer.precision={trainer['precision']!r}; plan knows: 32-true, bf16-mixed, 16-mixed.")
    if isinstance(strategy, str) and strategy != "auto" and strategy not in StrategyRegistry:
        raise UserError(f"trainer.strategy={strategy!r} is unknown; expected auto, ddp, fsdp2.")
    check_strategy(strategy if isinstance(strategy, str) else locate(strategy["class_path"]))


def plan_memory(module: TrainingModule, trainer: dict, batch_size: int, axes: dict[str, int]) -> Memory:
    """Count what a rank holds."""
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
    """Read the mesh of a configured strategy; all ranks are shards if it does not say otherwise."""
    options = {} if strategy is None or isinstance(strategy, str) else strategy.get("init_args") or {}
    return mesh_axes(world, **{name: options.get(name, 1) for name in ("replicas", "tensor_parallel")})


def _mesh_name(strategy: object, axes: dict[str, int]) -> str:
    if not is_sharding(strategy):
        return "each with the whole model"
    parts = [f"{axes[SHARDS]} shards"]
    if axes[HEADS] > 1:
        parts.append(f"of {axes[HEADS]} ranks, which split heads")
    if axes[REPLICAS] > 1:
        parts.append(f"in each of {axes[REPLICAS]} replicas")
    return " ".join(parts)
