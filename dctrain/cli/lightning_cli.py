"""The trainers' common command line: LightningCLI with `--resume`, this project's loggers, checkpoints and errors."""

import inspect
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import lightning as L
from jsonargparse import Namespace
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from ..callbacks.checkpoints import BestCheckpoint
from ..callbacks.run_record import RunRecord
from ..callbacks.training import best_checkpoint, place_checkpoints, training_callbacks
from ..callbacks.validation import is_validation_due
from ..checkpointing.checkpoint import (
    CHECKPOINTS,
    LATEST,
    check_resumable,
    check_weights,
    find_checkpoint,
    map_checkpoint,
    newest_checkpoint,
    run_folder,
)
from ..checkpointing.lightning_io import AtomicCheckpointIO
from ..distributed.meta_init import on_meta_device
from ..distributed.rendezvous import mark_launcher
from ..distributed.slurm import cluster_plugins
from ..distributed.strategy import check_strategy, is_sharding
from ..errors import UserError, as_user_error, reason
from ..explain.composition_scalars import CompositionScalars  # noqa: F401  a name for --trainer.callbacks
from ..lightning_internals import HookedCLI
from ..loggers import DEFAULT, IN_RUN, configure_loggers, finish, truncate_curves
from ..loggers import describe as describe_logger
from ..run_dir import RunDir, RunTrainer, locked_run, new_run
from ..utils.files import relative
from ..utils.signals import ExitOnSignal, exits_on_sigterm
from .subcommands import Program, UserErrorParser, check_not_empty
from .trainer_args import check_callbacks, check_devices, check_environment, check_trainer, plain_values

RESTORES = "lightning.pytorch.trainer.connectors.checkpoint_connector"
NAMES_LOGGER, SAVE_DIR = ("--trainer.logger", "--trainer.logger+"), "--trainer.logger.save_dir"
OF_UNIONS = ("Not a valid subclass of", "Expected a ")  # the parser's messages about alternatives that were not meant
NAMED = ("resume", "init", "checkpoint", "out", "throughput")  # options that are paths
LIMITS = {"validate": "limit_val_batches", "test": "limit_test_batches", "predict": "limit_predict_batches"}
OF_FILES = ("CSVLogger", "TensorBoardLogger")
A_CHECKPOINT = "a checkpoint (NAME.ckpt), or the folder of a run, whose newest checkpoint is used"


class TrainerParser(UserErrorParser, LightningArgumentParser):
    """Parses the arguments of a Lightning subcommand."""


class TrainerCLI(HookedCLI):
    """LightningCLI with `--resume` and `--checkpoint`, and this project's logger, checkpoints and callbacks.

    Args:
        args: Arguments of the command.
        module_class: The LightningModule.
        datamodule_class: The LightningDataModule.
    """

    program: Program
    linked: tuple[str, ...]
    monitor: str
    monitor_mode: str
    best_name: str
    init_sources: str

    def __init__(self, module_class, datamodule_class, args: list[str]) -> None:
        check_environment()
        self._is_init_given = any(arg.split("=")[0] == "--init" for arg in args)  # not in config.yaml
        self.resume_from: Path | None = None
        self.resumed_step = 0
        with ExitStack() as self._held:  # lock of the run's folder
            super().__init__(
                module_class,
                datamodule_class,
                args=_with_folders(args),
                parser_class=TrainerParser,
                trainer_class=RunTrainer,
                save_config_callback=None,  # `RunRecord` saves it
                seed_everything_default=0,
                auto_configure_optimizers=False,
                trainer_defaults={
                    "use_distributed_sampler": False,
                    "logger": [DEFAULT],
                    "enable_model_summary": False,  # `CostRecord` prints the model's size and FLOPs
                },
                parser_kwargs={
                    "prog": self.program.name,
                    "allow_abbrev": False,
                    "description": self.program.description,
                },
            )

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Subcommands with their excluded options; `--resume` and `--checkpoint` replace Lightning's `--ckpt_path`."""
        return {name: skipped | {"ckpt_path", "weights_only"} for name, skipped in LightningCLI.subcommands().items()}

    def add_subcommand_arguments(self, parser, subcommand: str) -> None:
        """Add `--resume` of `fit` or `--checkpoint`."""
        option, help_text = ("--checkpoint", f"evaluate {A_CHECKPOINT}")
        if subcommand == "fit":
            option, help_text = (
                "--resume",
                f"Continue from {A_CHECKPOINT}. {LATEST!r}: newest run of --name, or a new run.",
            )
        parser.add_argument(option, type=str | None, metavar="CHECKPOINT", help=help_text)

    def add_arguments_to_parser(self, parser) -> None:
        """Add the run's arguments, and link arguments shared by model and data."""
        parser.add_argument("--name", type=str, default=self.program.name, help="Folder of the experiment's runs.")
        parser.add_argument(
            "--checkpoint_every_n_steps", type=int, default=500, help="Optimizer steps between full checkpoints."
        )
        help_text = f"Initial weights of a new run: {self.init_sources}."
        parser.add_argument("--init", type=str | None, default=None, metavar="WEIGHTS", help=help_text)
        for name in self.linked:
            parser.link_arguments(f"data.{name}", f"model.{name}")

    def instantiate_classes(self) -> None:
        """Open the run's folder, and build trainer, model and data."""
        self.config = plain_values(self.config)
        trainer = self.setting("trainer")
        check_trainer(trainer)
        check_devices(trainer)
        self.check_named()
        root = Path(trainer.default_root_dir or "runs").resolve()
        self.run_dir = None if trainer.get("fast_dev_run") else self._open_run(root)
        self.given = self.config[self.subcommand].clone()
        if self.run_dir is not None:
            trainer.logger = configure_loggers(trainer.get("logger"), self.run_dir)
        try:
            with on_meta_device() if is_sharding(trainer.get("strategy")) else nullcontext():
                super().instantiate_classes()
        except ValueError as error:
            raise _constructor_error(error) from error

    def check_named(self) -> None:
        """Check the name of the run, and that no path is empty.

        Raises:
            UserError: If its folder would not be below the root folder, or a path is empty.
        """
        check_not_empty({name: self.setting(name) for name in NAMED})
        for group in ("data", "trainer"):
            values = vars(self.setting(group))
            check_not_empty({f"{group}.{name}": value for name, value in values.items()})
        _check_name(self.setting("name"))
        root = str(self.setting("trainer").default_root_dir or "")
        if "://" in root:
            raise UserError(f"trainer.default_root_dir={root}: expected a local folder, such as a mount point.")

    def _open_run(self, root: Path) -> RunDir:
        """Find or create the folder of the run: for `fit` the run itself, for evaluations a folder within their run."""
        name = self.setting("name")
        if self.subcommand != "fit":
            named = self.setting("checkpoint")
            run = None if named is None else run_folder(find_checkpoint(named).resolve())
            if run is not None:
                return RunDir(run / self.subcommand, root, run.parent.name, f"{run.name}/{self.subcommand}")
            run = self._held.enter_context(new_run(root / name))
            return RunDir(run, root, name, run.name)
        self.resume_from = self._find_resumed(root)
        if self.resume_from is not None:
            # fail here, with one message, rather than on every rank
            self.resumed_step = check_resumable(self.resume_from)
        run = None if self.resume_from is None else run_folder(self.resume_from)
        if run is None:
            run = self._held.enter_context(new_run(root / name, self._has_trained))
            return RunDir(run, root, name, run.name)
        self._held.enter_context(locked_run(run))
        return RunDir(run, root, run.parent.name, run.name, is_resumed=True)

    def set_seed(self) -> None:
        """Set the seed of all random numbers, which must be a number."""
        if isinstance(self.setting("seed_everything"), bool):
            raise UserError("seed_everything: expected a number, which is recorded in the run's config.yaml.")
        with as_user_error("seed_everything"):
            super().set_seed()

    def instantiate_trainer(self, **kwargs) -> L.Trainer:
        """Build the trainer with this project's checkpoint writer and callbacks."""
        config = self.setting("trainer", self.config_init)
        check_strategy(config.get("strategy") or "auto")
        root = config.get("default_root_dir") or "runs"
        kwargs["default_root_dir"] = root
        plugins = _as_list(config.get("plugins"))
        plugins += cluster_plugins(plugins, Path(root), self.resume_from is not None)
        kwargs["plugins"] = [*plugins, AtomicCheckpointIO(reads_optimizer=self.subcommand == "fit")]
        kwargs["callbacks"] = self._callbacks(config)
        with as_user_error("trainer"):
            trainer = super().instantiate_trainer(**kwargs)
        trainer.run_dir = self.run_dir
        mark_launcher()
        self._held.callback(finish, trainer.loggers)
        if self.run_dir is not None and self.run_dir.is_resumed:
            truncate_curves(trainer.loggers, self.resumed_step, is_validation_due(self.resume_from))
        return trainer

    def _find_resumed(self, root: Path) -> Path | None:
        """Return the checkpoint selected by `--resume`."""
        named = self.setting("resume")
        if named != LATEST:
            return None if named is None else find_checkpoint(named).resolve()
        found = newest_checkpoint(root / self.setting("name"))
        if found is None:
            self.config[self.subcommand]["resume"] = None  # a new run with its own configuration
        return found

    def _has_trained(self) -> bool:
        return getattr(self, "trainer", None) is not None and self.trainer.global_step > self.resumed_step

    def _callbacks(self, config: Namespace) -> list[Callback]:
        """Return the user's callbacks and those of the subcommand, in order."""
        of_user = _as_list(config.get("callbacks"))
        check_callbacks(of_user)
        if self.run_dir is not None:
            place_checkpoints(of_user, self.run_dir.path / CHECKPOINTS)
        if self.subcommand != "fit":
            return [*of_user, ExitOnSignal()]
        if config.get("fast_dev_run"):
            return of_user
        best = None
        if config.get("enable_checkpointing") is not False:
            best = best_checkpoint(self.run_dir.path / CHECKPOINTS, self.monitor, self.monitor_mode, self.best_name)
        record = RunRecord(self.parser_of(self.subcommand), self.given, self.run_dir.is_resumed)
        has_bar = config.get("enable_progress_bar") is not False
        return training_callbacks(of_user, self.setting("checkpoint_every_n_steps"), record, best, has_bar)

    def describe_score(self, score: float) -> str:
        """Format the best value of the monitored metric for the summary line of a run."""
        raise NotImplementedError

    def fit(self, model: L.LightningModule, **kwargs) -> None:
        """Train: from the checkpoint of `--resume`, from the weights of `--init`, or from random weights."""
        source = self.setting("init")
        if source is not None and self.resume_from is None:
            self.check_init(source)
            model.start_from(source)
        elif source is not None and self.trainer.is_global_zero:
            print(f"init={source} is not used: the run continues from {relative(self.resume_from)}", flush=True)
        if self.resume_from is not None:
            self._check_position(self.resume_from)
        with reading(self.resume_from):
            self.trainer.fit(model, ckpt_path=self.resume_from, **kwargs)

    def check_init(self, source: str) -> None:
        """Raise UserError if initial weights do not match the data; implemented by subclasses."""

    def _check_position(self, checkpoint: Path) -> None:
        """Raise UserError for a checkpoint without a position in the data, because training would restart the data."""
        name = type(self.datamodule).__qualname__
        if name not in map_checkpoint(checkpoint):
            raise UserError(f"{checkpoint} cannot be resumed: it has no state of {name}, the position in the data.")

    def after_fit(self) -> None:
        """Print the results and where they are in one line."""
        log_dir = self.trainer.log_dir  # a collective operation: called on all ranks
        if not self.trainer.is_global_zero or self.trainer.fast_dev_run:
            return
        best = next((one for one in self.trainer.checkpoint_callbacks if isinstance(one, BestCheckpoint)), None)
        result = ""
        if best is not None and best.best_model_score is not None:
            result = f"best {self.monitor} {self.describe_score(float(best.best_model_score))} | "
            result += f"checkpoint {relative(best.best_model_path)} | "
        if self.trainer.global_step == self.resumed_step > 0:
            print(f"nothing was trained: the run had already finished at step {self.resumed_step}")
        shown = [describe_logger(logger, relative) for logger in self.trainer.loggers] or [f"run {relative(log_dir)}"]
        print(f"{result}{' | '.join(shown)}")

    def validate(self, model: L.LightningModule, **kwargs) -> None:
        """Evaluate a checkpoint on the validation data."""
        path = self.evaluated_checkpoint()
        with reading(path), exits_on_sigterm():
            self.trainer.validate(model, ckpt_path=path, **kwargs)

    def test(self, model: L.LightningModule, **kwargs) -> None:
        """Evaluate a checkpoint, logged as `test/...`."""
        path = self.evaluated_checkpoint()
        with reading(path), exits_on_sigterm():
            self.trainer.test(model, ckpt_path=path, **kwargs)

    def has_weights(self) -> bool:
        """Whether the configured model has pretrained weights."""
        return False

    def evaluated_checkpoint(self) -> Path | None:
        """Return the checkpoint of `--checkpoint`; raise UserError for random weights or an invalid checkpoint."""
        named = self.setting("checkpoint")
        init = self.setting("init")
        if init is not None and self._is_init_given:
            raise UserError(f"init={init}: only fit accepts it; {self.subcommand} uses the weights of --checkpoint.")
        limit = LIMITS[self.subcommand]
        if self.setting("trainer").get(limit) == 0:
            raise UserError(f"trainer.{limit}=0 leaves no data to {self.subcommand}.")
        if named is None and not self.has_weights():
            raise UserError(f"--checkpoint: expected {A_CHECKPOINT}, or a model with pretrained weights.")
        if named is None:
            return None
        path = find_checkpoint(named)
        check_weights(path)
        return path


class VocabularyCLI(TrainerCLI):
    """Command line of models with text: the data determine the number of embedding rows; there is no `predict`."""

    vocabulary_rows: Callable[..., int]  # returns their number; its parameters are options of the data

    def add_arguments_to_parser(self, parser) -> None:
        """Also link the model's vocabulary size to the tokenizer's."""
        super().add_arguments_to_parser(parser)
        sources = tuple(f"data.{name}" for name in inspect.signature(self.vocabulary_rows).parameters)
        parser.link_arguments(sources, "model.vocab_size", compute_fn=self.vocabulary_rows)

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """Subcommands with their excluded options."""
        commands = TrainerCLI.subcommands()
        del commands["predict"]
        return commands


def _constructor_error(error: ValueError) -> Exception:
    """Return the error of the class's constructor from the parser's message about all accepted types."""
    listed = str(error).partition("Errors:\n")[2].partition("\nGiven value")[0]
    found = [" ".join(message.split()) for message in re.split(r"^  - ", listed, flags=re.M)]
    found = [message for message in found if message and not message.startswith(OF_UNIONS)]
    return UserError(found[0]) if found else error


def _check_name(name: str) -> None:
    """Check the name of an experiment.

    Raises:
        UserError: If its folder would not be below the root folder.
    """
    if not name or Path(name).is_absolute() or {".", ".."} & set(name.split("/")):
        raise UserError(f"name={name!r} must be the name of a folder below trainer.default_root_dir.")


@contextmanager
def reading(checkpoint: Path | None) -> Iterator[None]:
    """Convert errors while Lightning restores a checkpoint to a `UserError`: the file is malformed."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        names = [(f.f_globals.get("__name__"), f.f_code.co_name) for f, _ in traceback.walk_tb(error.__traceback__)]
        if not any(module == RESTORES and "restore" in name for module, name in names):
            raise
        raise UserError(f"{checkpoint} cannot be read: {type(error).__name__}: {reason(error)}") from error


def _with_folders(args: list[str]) -> list[str]:
    """Add the required `save_dir` of file loggers, which is the run's folder unless a later argument changes it."""
    completed = []
    for before, arg in zip(["", *args], args, strict=False):
        completed.append(arg)
        option, _, value = arg.partition("=")
        named = value if option in NAMES_LOGGER else arg if before in NAMES_LOGGER else ""
        if named.split(".")[-1] in OF_FILES:
            completed.append(f"{SAVE_DIR}={IN_RUN}")
    return completed


def _as_list(value) -> list:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]
