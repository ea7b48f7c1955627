"""TrainingModule: optimizer, learning-rate schedule and random numbers of a step, shared by all trainers."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import NamedTuple

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

from dcmha import ComposedAttentionBase
from dcmha.weights import ComposeProjection

from .checkpointing.resume_checks import changed_settings, check_moments, stored_form
from .cli.argument_types import check_types
from .distributed.grad_norm import total_norm
from .distributed.meta_init import load_shards
from .distributed.strategy import FSDP2Strategy, data_rank
from .distributed.tensor_parallel import TensorParallelPlan
from .errors import DivergenceError, UserError, as_user_error
from .evaluation.items import ItemRecorder
from .lightning_internals import attached_trainer, set_logged_step
from .lr_schedule import warmup_cosine
from .plan.flops import forward_flops
from .run_length import count_run_steps, is_set

WARMUP_OF_SHORT_RUNS = 10  # 1/10 of a run is warm-up if the run is shorter than the configured warm-up
MAX_SKIPPED = 5  # maximum consecutive steps skipped because of non-finite values
MAX_RATE = 1e6  # of learning rate and weight decay; the optimizer computes in 32 bits
CHECKED_ELSEWHERE = ("num_workers", "batch_size")  # data settings without effect, or reported as the global batch


class Example(NamedTuple):
    """Inputs of a network on the meta device, and their number of units (images, tokens)."""

    args: tuple
    kwargs: dict[str, torch.Tensor]
    units: int


class TrainingModule(L.LightningModule):
    """LightningModule with AdamW, warm-up and cosine schedule per step, for the network in `self.model`.

    Subclasses save the hyperparameters `model`, `lr`, `weight_decay`, `betas`, `decay_all`, `final_lr_fraction`,
    `compile` and `seed`, set `forward_flops` (per unit), and define `speed_unit` and `count_units`.

    Random numbers of a step are a function of (seed, step, rank), so that a resumed run has the same ones; ranks with
    the same data have the same random numbers.

    A step with a non-finite loss or gradient on any rank is counted, logged and skipped. After `MAX_SKIPPED`
    consecutive skipped steps the run ends with `DivergenceError`.

    Attributes:
        skipped: Number of skipped steps.
        skipped_in_a_row: Number of consecutive skipped steps up to now.
        items: Per-item results of the last evaluation.
    """

    speed_unit: str
    forward_flops: int | None

    def __init__(self) -> None:
        super().__init__()
        self.skipped = self.skipped_in_a_row = 0
        self.items = ItemRecorder()
        self._trained: dict[str, object] = {}  # hyperparameters of the loaded checkpoint
        self._trained_data: dict[str, object] = {}  # hyperparameters of its data module
        self._initial: dict[str, torch.Tensor] = {}  # initial weights, loaded after sharding

    def count_units(self, batch) -> int:
        """Count the units (images, tokens) in a batch of one rank."""
        raise NotImplementedError

    def example(self, batch_size: int) -> Example:
        """Create a batch of inputs of `self.model` on the meta device."""
        raise NotImplementedError

    def warmup_steps(self, total_steps: int) -> int:
        """Return the number of warm-up steps."""
        raise NotImplementedError

    def read_initial(self, source: str) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Read initial weights for `self.model`, and the names of parameters that keep their random initialization.

        Raises:
            UserError: If there are none, or they do not match.
        """
        raise NotImplementedError

    def start_from(self, source: str) -> None:
        """Load initial weights before training.

        Args:
            source: Location of the weights.

        Raises:
            UserError: If there are none, or they do not match.
        """
        weights, drawn = self.read_initial(source)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            self._initial = weights
        else:
            self.model.load_state_dict(weights, strict=False)
        message = f"; {len(drawn)} tensors are randomly initialized, the first is {drawn[0]}" if drawn else ""
        rank_zero_only(print)(f"initial weights from {source}{message}", flush=True)

    def split_model(self, rank: int, ranks: int) -> TensorParallelPlan:
        """Change `self.model` to compute a rank's share of each layer; return how it is split."""
        raise UserError(f"trainer.strategy.tensor_parallel={ranks}: model {self.hparams.model!r} cannot be split.")

    def check_ranges(self) -> None:
        """Check the hyperparameters common to all modules.

        Raises:
            UserError: If one is out of range.
        """
        hp = self.hparams
        check_types(type(self).__init__, hp)
        for name in ("lr", "weight_decay"):
            if not 0 <= hp[name] <= MAX_RATE:
                raise UserError(f"{name}={hp[name]} must be in [0, {MAX_RATE:g}].")
        if not 0 <= hp.final_lr_fraction <= 1:
            raise UserError(f"final_lr_fraction={hp.final_lr_fraction} must be in [0, 1].")
        is_pair = isinstance(hp.betas, list | tuple) and len(hp.betas) == 2
        if not is_pair or not all(isinstance(beta, Real) and 0 <= beta < 1 for beta in hp.betas):
            raise UserError(f"betas={hp.betas!r}: expected two numbers in [0, 1).")
        if not 0 <= hp.seed < 2**32:
            raise UserError(f"seed={hp.seed} must be in [0, 2^32).")

    def count_flops(self, model: nn.Module, *example: object) -> int:
        """Count the FLOPs of a forward pass, and check that the model accepts the example and runs on this device.

        Args:
            model: The network.
            *example: Its arguments, on the meta device; the first is a tensor.

        Raises:
            UserError: If not.
        """
        name = self.hparams.get("model", type(self.model).__name__)
        with as_user_error(f"model {name!r} does not accept inputs of shape {list(example[0].shape)}"):
            flops = forward_flops(model, *example)
        device = self.trainer.strategy.root_device
        for layer in self.model.modules():
            if isinstance(layer, ComposedAttentionBase) and layer.options.is_composed:
                with as_user_error("model"):
                    layer.check_device(device)
        return flops

    def shard_and_compile(self, blocks: Iterable[nn.Module]) -> None:
        """Shard `self.model` by block under FSDP2, and compile it in place if requested; under FSDP2 only its blocks
        are compiled.
        """
        compiled = [self.model]
        if isinstance(self.trainer.strategy, FSDP2Strategy):
            self._refuse_batch_norm()
            strategy = self.trainer.strategy
            strategy.shard(self.model, blocks, self.trainer.precision, self.split_model)
            load_shards(self.model, strategy.layout, self._initial)
            self._initial = {}
            compiled = blocks
        for module in compiled if self.hparams.compile else ():
            module.compile()

    def _refuse_batch_norm(self) -> None:
        """Raise UserError for models with batch norm, whose statistics FSDP2 does not synchronize."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                raise UserError(
                    f"trainer.strategy: {name} of the model is a batch norm, which FSDP2 does not support; use ddp."
                )

    def on_train_batch_start(self, batch, batch_idx: int) -> None:
        """Seed the random numbers of this step, and correct the loggers' step."""
        set_logged_step(self.trainer)
        step = self.trainer.fit_loop.epoch_loop.batch_progress.total.processed
        key = np.random.SeedSequence([self.hparams.seed, step, data_rank(self.trainer).rank])
        torch.manual_seed(int(key.generate_state(1, np.uint64)[0] >> 1))

    def on_train_start(self) -> None:
        """Apply and print the changed settings of a resumed run."""
        if not self._trained:
            return
        others = changed_settings(self._trained, self.hparams)
        if self.trainer.datamodule is not None:
            others += changed_settings(self._trained_data, self.trainer.datamodule.hparams, "data.")
        if others and self.trainer.is_global_zero:
            print(f"resumed with changed settings: {', '.join(others)}", flush=True)
        optimizer, schedule = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs[0].scheduler
        check_moments(optimizer)
        for group, ours in zip(optimizer.param_groups, self._parameter_groups(), strict=True):
            group["initial_lr"], group["betas"] = self.hparams.lr, tuple(self.hparams.betas)
            group["weight_decay"] = ours["weight_decay"]
            group["lr"] = self.hparams.lr * schedule.lr_lambdas[0](schedule.last_epoch)
        schedule.base_lrs = [self.hparams.lr for _ in optimizer.param_groups]
        schedule._last_lr = [group["lr"] for group in optimizer.param_groups]

    def on_validation_start(self) -> None:
        """Clear the items of the previous evaluation."""
        self.items.clear()

    def on_test_start(self) -> None:
        """Clear the items of the previous evaluation."""
        self.items.clear()

    def log_step(self, loss: torch.Tensor, batch_size: int) -> torch.Tensor:
        """Log the loss and the learning rate of a training step, and return the loss for the backward pass.

        A non-finite loss makes all gradients non-finite, which all ranks detect.
        """
        self.log("train/loss", loss, prog_bar=True, batch_size=batch_size)
        self.log("train/lr", self.optimizers().param_groups[0]["lr"], batch_size=batch_size)
        return loss * (1 + 0 * loss.detach())

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        """Clip the global norm (`trainer.gradient_clip_val`) and log it; skip the step if it is not finite."""
        if gradient_clip_algorithm not in (None, "norm"):
            got = getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm)
            raise UserError(f"trainer.gradient_clip_algorithm={got!r}; expected 'norm'.")
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm = total_norm([p.grad for p in parameters])
        nn.utils.clip_grads_with_norm_(parameters, gradient_clip_val or math.inf, norm)
        self.log("train/grad_norm", norm)
        if norm.isfinite():
            self.skipped_in_a_row = 0
        elif not self._is_rescaling():
            self._skip_step(optimizer)
        self.log("train/skipped_steps", float(self.skipped))

    def _is_rescaling(self) -> bool:
        """Whether a gradient scaler will skip this step, because its factor is too large."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        return scaler is not None and scaler.get_scale() > 1

    def _skip_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Skip the step: clear gradients and count it; end the run after too many.

        Raises:
            DivergenceError: After too many consecutive skipped steps.
        """
        optimizer.zero_grad(set_to_none=True)
        self.skipped += 1
        self.skipped_in_a_row += 1
        message = f"step {self.trainer.global_step}: the loss or its gradient is not finite"
        if self.skipped_in_a_row > MAX_SKIPPED:
            raise DivergenceError(f"{message}, as in the {MAX_SKIPPED} steps before; training has diverged.")
        if self.trainer.is_global_zero:
            print(
                f"{message}; the step is skipped ({self.skipped_in_a_row} in a row, at most {MAX_SKIPPED}).", flush=True
            )

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        """Save the counts of skipped steps."""
        checkpoint["skipped_steps"] = [self.skipped, self.skipped_in_a_row]

    def configure_optimizers(self) -> dict:
        """AdamW with warm-up and cosine schedule per step."""
        hp = self.hparams
        total_steps = self._total_steps()
        warmup_steps = self.warmup_steps(total_steps)
        if warmup_steps >= total_steps:
            shortened = total_steps // WARMUP_OF_SHORT_RUNS
            message = f"warm-up of {warmup_steps} steps shortened to {shortened}: the run has {total_steps} steps"
            rank_zero_only(print)(message, flush=True)
            warmup_steps = shortened
        optimizer = torch.optim.AdamW(
            self._parameter_groups(), lr=hp.lr, betas=tuple(hp.betas), fused=self._is_fused() or None
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, warmup_steps, total_steps, hp.final_lr_fraction)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _is_fused(self) -> bool:
        """Whether to use the fused optimizer: on a GPU, without a gradient scaler."""
        has_scaler = getattr(self.trainer.precision_plugin, "scaler", None) is not None
        return self.trainer.strategy.root_device.type == "cuda" and not has_scaler

    def _total_steps(self) -> int:
        """Count the optimizer steps of the run.

        `trainer.estimated_stepping_batches` is not used, because it creates the training loader before a checkpoint's
        position is restored.
        """
        trainer, steps_per_epoch = self.trainer, None
        if is_set(trainer.max_epochs):
            if trainer.datamodule is None:  # loaders without a position
                return int(trainer.estimated_stepping_batches)
            steps_per_epoch = -(-trainer.datamodule.steps_per_epoch // trainer.accumulate_grad_batches)
        return count_run_steps(trainer.max_steps, trainer.max_epochs, steps_per_epoch)

    def _parameter_groups(self) -> list[dict]:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        gates = {id(m.gate) for m in self.model.modules() if isinstance(m, ComposeProjection)}

        def decays(p: nn.Parameter) -> bool:
            return self.hparams.decay_all or (p.ndim > 1 and id(p) not in gates)

        groups = [
            {"params": [p for p in trained if decays(p)], "weight_decay": self.hparams.weight_decay},
            {"params": [p for p in trained if not decays(p)], "weight_decay": 0.0},
        ]
        return [group for group in groups if group["params"]]

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        """Check the architecture before torch reports every key, and restore the counts of skipped steps."""
        self.skipped, self.skipped_in_a_row = checkpoint.get("skipped_steps", (0, 0))
        trained = checkpoint.get("hyper_parameters", {})
        self._trained = {name: trained[name] for name in self.hparams if name in trained}
        data = checkpoint.get("datamodule_hyper_parameters", {})
        self._trained_data = {name: data[name] for name in data if name not in CHECKED_ELSEWHERE}
        is_resumed = attached_trainer(self) is not None and self.trainer.state.fn == TrainerFn.FITTING
        if is_resumed and self._trained.get("decay_all", self.hparams.decay_all) != self.hparams.decay_all:
            raise UserError(f"decay_all={self.hparams.decay_all} cannot change when a run is resumed.")
        if is_resumed:
            self._check_averaging("averaging_state" in checkpoint)
        if "state_dict" in checkpoint:  # sharded checkpoints were already compared
            self.check_architecture({key: x.shape for key, x in checkpoint["state_dict"].items()}, trained)

    def _check_averaging(self, was_averaged: bool) -> None:
        """Raise UserError if weight averaging was added or removed on a resume, because weights would be lost."""
        averages = any(isinstance(callback, WeightAveraging) for callback in self.trainer.callbacks)
        if averages != was_averaged:
            names = ("without", "with") if averages else ("with", "without")
            raise UserError(f"trainer.callbacks: the run was trained {names[0]} weight averaging, not {names[1]} it.")

    def check_architecture(self, theirs: Mapping[str, torch.Size], trained: Mapping[str, object]) -> None:
        """Compare a checkpoint's tensors with this module's.

        Args:
            theirs: Shapes of the checkpoint's tensors.
            trained: Its hyperparameters.

        Raises:
            UserError: If the architecture differs.
        """
        ours = {key: x.shape for key, x in self.state_dict().items()}
        different = sorted(ours.keys() ^ theirs.keys()) or sorted(key for key in ours if ours[key] != theirs[key])
        if different:
            others = {
                name: value
                for name, value in self.hparams.items()
                if stored_form(trained.get(name)) != stored_form(value)
            }
            message = "; ".join(f"{name}={trained.get(name)!r}, here {value!r}" for name, value in others.items())
            raise UserError(
                f"the checkpoint has a different architecture: {len(different)} tensors differ, the first is "
                f"{different[0]}; it was trained with {message or 'the same hyperparameters'}."
            )
