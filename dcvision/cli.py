"""Command line: `python -m dcvision fit|validate|test|predict --config FILE ...` and `python -m dcvision export`."""

import argparse
import csv
import gc
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.cli import LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import TensorBoardLogger

from .callbacks import GracefulStop, LastCheckpoint, RunStopped, SpeedMonitor
from .checkpoint import AtomicCheckpointIO, find_checkpoint, load_checkpoint, run_folder
from .classifier import ImageClassifier
from .data import ImageDataModule
from .errors import UserError
from .export import export

EXPORT_HELP = "One more subcommand, export CHECKPOINT FOLDER, writes a checkpoint as a timm model folder."


class SaveRunConfig(SaveConfigCallback):
    """Saves what was configured, without the one-off `resume`, so that the file serves every subcommand."""

    def __init__(self, parser, config, **kwargs) -> None:
        config = config.clone()
        resumed = config.pop("resume", None) is not None
        config.pop("ckpt_path", None)
        filename = "config-resumed.yaml" if resumed else "config.yaml"
        super().__init__(parser, config, config_filename=filename, overwrite=resumed, **kwargs)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Save for training runs only."""
        if stage == "fit":
            super().setup(trainer, pl_module, stage)


class VisionCLI(LightningCLI):
    """LightningCLI with the links between data and model, `--resume`, and this package's checkpoints and callbacks."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """List the subcommands; `fit` takes `--resume` in place of `--ckpt_path`."""
        commands = LightningCLI.subcommands()
        commands["fit"] = commands["fit"] | {"ckpt_path", "weights_only"}
        return commands

    def _prepare_subcommand_parser(self, klass, subcommand: str, **kwargs):
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            parser.add_argument(
                "--resume", type=str | None, help="Go on exactly where a checkpoint, or a run's newest one, stopped."
            )
        return parser

    def add_arguments_to_parser(self, parser) -> None:
        """Add the run's own arguments and link what model and data must agree on."""
        parser.add_argument("--name", type=str, default="dcvision", help="Folder of the experiment's runs.")
        parser.add_argument(
            "--checkpoint_every_n_steps", type=int, default=500, help="Optimiser steps between full checkpoints."
        )
        for name in ("num_classes", "image_size", "seed"):
            parser.link_arguments(f"data.{name}", f"model.{name}")

    def _parse_ckpt_path(self) -> None:
        """Leave the configuration alone: Lightning would let the checkpoint's hyperparameters override it."""

    def instantiate_trainer(self, **kwargs) -> L.Trainer:
        """Build the trainer with our logger, checkpoint writer and callbacks."""
        config = self._get(self.config_init, "trainer")
        root = config.get("default_root_dir") or "runs"
        resume = self._get(self.config, "resume", default=None)
        self.resume_from = None if resume is None else find_checkpoint(resume)
        if self.resume_from is not None:
            load_checkpoint(self.resume_from)  # fail now, with one message, rather than on every rank
        if config.get("logger") in (None, True):
            kwargs["logger"] = self._logger(root)
        kwargs["default_root_dir"] = root
        kwargs["plugins"] = [*_as_list(config.get("plugins")), AtomicCheckpointIO()]
        kwargs["callbacks"] = [*_as_list(config.get("callbacks")), *self._callbacks(config)]
        return super().instantiate_trainer(**kwargs)

    def _logger(self, root: str) -> TensorBoardLogger:
        """Log to a new folder, or to that of the run being resumed."""
        folder = None if self.resume_from is None else run_folder(self.resume_from)
        if folder is None:
            return TensorBoardLogger(root, name=self._get(self.config, "name"), default_hp_metric=False)
        return TensorBoardLogger(folder.parent, name="", version=folder.name, default_hp_metric=False)

    def _callbacks(self, config: dict) -> list[Callback]:
        if self.subcommand != "fit" or config.get("fast_dev_run"):
            return []
        last = LastCheckpoint(self._get(self.config, "checkpoint_every_n_steps"))
        callbacks = [last, GracefulStop(last), SpeedMonitor()]
        if config.get("enable_checkpointing") is not False:
            best = "best-epoch={epoch}-top1={val/top1:.4f}"
            callbacks.append(
                ModelCheckpoint(monitor="val/top1", mode="max", filename=best, auto_insert_metric_name=False)
            )
        return callbacks

    def fit(self, model: ImageClassifier, **kwargs) -> None:
        """Train, from where `--resume` says."""
        self.trainer.fit(model, ckpt_path=self.resume_from, **kwargs)

    def after_fit(self) -> None:
        """Say in one line what came out and where it is."""
        log_dir = self.trainer.log_dir  # a broadcast: all ranks ask
        if not self.trainer.is_global_zero or self.trainer.fast_dev_run:
            return
        best = self.trainer.checkpoint_callback
        result = ""
        if isinstance(best, ModelCheckpoint) and best.best_model_score is not None:
            result = f"best val/top1 {100 * float(best.best_model_score):.2f} % | "
            result += f"checkpoint {_relative(best.best_model_path)} | "
        print(f"{result}tensorboard --logdir {_relative(log_dir)}")

    def validate(self, model: ImageClassifier, **kwargs) -> None:
        """Evaluate a checkpoint."""
        self._check_weights(kwargs)
        self.trainer.validate(model, **kwargs)

    def test(self, model: ImageClassifier, **kwargs) -> None:
        """Evaluate a checkpoint, logged as `test/...`."""
        self._check_weights(kwargs)
        self.trainer.test(model, **kwargs)

    def _check_weights(self, kwargs: dict) -> None:
        """Refuse to evaluate random weights, or a file that is no checkpoint."""
        path, pretrained = kwargs["ckpt_path"], (self.model.hparams.model_kwargs or {}).get("pretrained")
        if path is None and not pretrained:
            raise UserError("--ckpt_path must name a checkpoint (or model.model_kwargs say pretrained: true).")
        if path is not None:
            kwargs["ckpt_path"] = find_checkpoint(path)
            load_checkpoint(kwargs["ckpt_path"])

    def predict(self, model: ImageClassifier, **kwargs) -> None:
        """Predict and write one line per image to `predictions.csv` (one file per rank on several)."""
        self._check_weights(kwargs)
        batches = self.trainer.predict(model, **{**kwargs, "return_predictions": True})
        suffix = f"-rank{self.trainer.global_rank}" if self.trainer.world_size > 1 else ""
        path = Path(self.trainer.log_dir) / f"predictions{suffix}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=["name", "class", "probability"])
            writer.writeheader()
            writer.writerows(row for batch in batches for row in batch)
        print(f"predictions {_relative(path)}")


def _as_list(value) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _relative(path: str | Path) -> Path:
    """Shorten a path below the working directory."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _export_command(args: list[str]) -> None:
    parser = argparse.ArgumentParser("dcvision export", description="Write a checkpoint as a timm model folder.")
    parser.add_argument("checkpoint", help="a .ckpt file of dcvision fit")
    parser.add_argument("folder", help="where to write config.json and model.safetensors")
    parser.add_argument("--raw", action="store_true", help="the raw weights, where the run also kept an average")
    options = parser.parse_args(args)
    folder = export(options.checkpoint, options.folder, options.raw)
    print(f'exported to {folder}; load with timm.create_model("local-dir:{folder}", pretrained=True)')


def _run(args: list[str]) -> None:
    if args[:1] == ["export"]:
        return _export_command(args[1:])
    for noise in (".*does not have many workers.*", ".*LightningCLI's args parameter.*", ".*LeafSpec.*"):
        warnings.filterwarnings("ignore", noise)
    cli = VisionCLI(
        ImageClassifier,
        ImageDataModule,
        args=args,
        save_config_callback=SaveRunConfig,
        seed_everything_default=0,
        trainer_defaults={"use_distributed_sampler": False},
        parser_kwargs={"allow_abbrev": False, "description": "Image classification with DCMHA. " + EXPORT_HELP},
    )
    if torch.distributed.is_initialized():
        del cli  # sharded parameters hold their process groups, whose threads must end before the interpreter does
        gc.collect()
        torch.distributed.destroy_process_group()


def main(args: list[str] | None = None) -> None:
    """Run the command line; mistakes a user can mend end in one message and exit status 2."""
    try:
        _run(sys.argv[1:] if args is None else args)
    except UserError as error:
        message = str(error)
        if message.startswith("Caught UserError"):  # raised in a loader process: keep the message, drop its stack
            message = message.strip().splitlines()[-1].removeprefix("dcvision.errors.UserError: ")
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    except RunStopped as stop:
        print(f"{stop}; go on with --resume {_relative(stop.checkpoint)}")
