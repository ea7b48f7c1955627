"""Private parts of Lightning that the trainers use; no other file does.

A minor version of Lightning may change them. `tests/dctrain/test_lightning_internals.py` names the versions with which
they are known to work, and checks that they exist.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from torch import Tensor


def set_logged_step(trainer: L.Trainer) -> None:
    """Set the step that is logged to the trainer's step; after some resumes Lightning's is one too high."""
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def is_logging_step(trainer: L.Trainer) -> bool:
    """Whether the metrics of this training step are logged."""
    return (trainer.fit_loop.epoch_loop._batches_that_stepped + 1) % trainer.log_every_n_steps == 0


def log_training_step(trainer: L.Trainer) -> None:
    """Log the metrics of this training step, which Lightning does after `on_train_batch_end`."""
    trainer._logger_connector.update_train_step_metrics()


def is_validation_next(trainer: L.Trainer) -> bool:
    """Whether a validation follows this training step."""
    loop = trainer.fit_loop
    return loop.epoch_loop._should_check_val_fx(loop._data_fetcher)


@contextmanager
def validating(trainer: L.Trainer) -> Iterator[None]:
    """Set the trainer's state for a validation outside the training loop, and restore it."""
    connector = trainer._logger_connector
    is_first = connector._first_loop_iter
    trainer.validating = True
    yield
    trainer.training = True
    connector._first_loop_iter = is_first


def has_distributed_sampler(trainer: L.Trainer) -> bool:
    """Whether `use_distributed_sampler` of the trainer is set."""
    return trainer._accelerator_connector.use_distributed_sampler


def attached_trainer(module: L.LightningModule) -> L.Trainer | None:
    """Return the trainer of a module; None if it has none, where `module.trainer` would raise."""
    return module._trainer


def hide_points_after(logger: Logger, step: int) -> None:
    """Make TensorBoard hide the points of an earlier run after a step, unless the user set `purge_step`.

    The writer of the logger does not exist yet.
    """
    if isinstance(logger, TensorBoardLogger) and logger._kwargs.get("purge_step") is None:
        logger._kwargs["purge_step"] = step + 1


def finish_started_run(logger: Logger) -> None:
    """Finish the run of Weights & Biases that a logger started; `experiment` alone would start one."""
    if isinstance(logger, WandbLogger) and logger._experiment is not None:
        logger.experiment.finish()


class HookedTrainer(L.Trainer):
    """A trainer with a hook before the process group starts."""

    def before_run(self) -> None:
        """Called at the start of `fit`, `validate`, `test` and `predict`."""

    def _run(self, *args, **kwargs):
        self.before_run()
        return super()._run(*args, **kwargs)


class FiniteCheckpoint(ModelCheckpoint):
    """A `ModelCheckpoint` for which a non-finite score is never the best."""

    def after_best(self, trainer: L.Trainer) -> None:
        """Called after the best checkpoints were updated."""

    def _save_topk_checkpoint(self, trainer: L.Trainer, monitor_candidates: dict[str, Tensor]) -> None:
        value = monitor_candidates.get(self.monitor)
        if value is not None and not torch.as_tensor(value).isfinite():
            return
        super()._save_topk_checkpoint(trainer, monitor_candidates)
        self.after_best(trainer)


class HookedCLI(LightningCLI):
    """A `LightningCLI` with public hooks, which does not read the configuration of a checkpoint."""

    def setting(self, name: str, config: Namespace | None = None) -> Any:
        """Return an option of the subcommand, from `self.config` or another configuration; None if it has none."""
        config = self.config if config is None else config
        return config.get(str(self.subcommand), config).get(name)

    def add_subcommand_arguments(self, parser, subcommand: str) -> None:
        """Add arguments to the parser of one subcommand."""

    def set_seed(self) -> None:
        """Set the seed of all random numbers."""
        super()._set_seed()

    def run_subcommand(self, subcommand: str) -> None:
        """Run the chosen subcommand."""
        super()._run_subcommand(subcommand)

    def parser_of(self, subcommand: str | None):
        """Return the parser of a subcommand."""
        return self._parser(subcommand)

    def _prepare_subcommand_parser(self, klass, subcommand: str, **kwargs):
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        self.add_subcommand_arguments(parser, subcommand)
        return parser

    def _set_seed(self) -> None:
        self.set_seed()

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_subcommand(subcommand)

    def _parse_ckpt_path(self) -> None:
        """Do nothing: Lightning would override the configuration with the checkpoint's hyperparameters."""
