"""Loggers of a run: they write into its folder, use its name, and continue when it is resumed.

| logger | destination |
|---|---|
| TensorBoardLogger, CSVLogger | the run's folder; with a `save_dir`, `SAVE_DIR/NAME/version_N` |
| WandbLogger | `wandb` in the run's folder, or in its `save_dir`; a resumed run keeps its id |
| MLFlowLogger | `mlruns` in `trainer.default_root_dir`, or its `tracking_uri`; a resumed run keeps its id |
| others | as configured; they start anew when a run is resumed |

No logger changes the folder of the run.
"""

import csv
import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from pydoc import locate

from jsonargparse import Namespace
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only

from .errors import UserError, as_user_error
from .lightning_internals import finish_started_run, hide_points_after
from .run_dir import LOGGERS, RunDir
from .utils.files import atomic_write, write_json

IN_RUN = ""  # value of `save_dir` for the run's folder
DEFAULT = {
    "class_path": "lightning.pytorch.loggers.TensorBoardLogger",
    "init_args": {"save_dir": IN_RUN, "default_hp_metric": False},
}
OF_LIGHTNING = "lightning_logs"  # Lightning's default name


def configure_loggers(loggers: object, run: RunDir) -> list[Namespace] | bool:
    """Set the destination and name of configured loggers.

    Args:
        loggers: The parsed `trainer.logger`: one or several class paths with arguments; None and True mean TensorBoard,
            False none.
        run: The run.

    Returns:
        The loggers, with default arguments filled in.
    """
    if loggers is False:
        return False
    if loggers in (None, True):
        loggers = Namespace(class_path=DEFAULT["class_path"], init_args=Namespace(DEFAULT["init_args"]))
    return [_configure(logger.clone(), run) for logger in (loggers if isinstance(loggers, list) else [loggers])]


def _configure(logger: Namespace, run: RunDir) -> Namespace:
    kind = locate(logger.class_path)
    for known, place in CONFIGURE.items():
        if isinstance(kind, type) and issubclass(kind, known):
            logger.init_args = logger.get("init_args") or Namespace()
            place(logger.init_args, run)
    return logger


def _configure_files(options: Namespace, run: RunDir) -> None:
    flush = options.get("flush_logs_every_n_steps", 1)
    if flush < 1:
        raise UserError(f"trainer.logger.flush_logs_every_n_steps={flush} must be at least 1.")
    is_named = options.get("name", OF_LIGHTNING) != OF_LIGHTNING or options.get("version") is not None
    if not is_named and (options.save_dir == IN_RUN or Path(options.save_dir).resolve() == run.root):
        options.update(Namespace(save_dir=str(run.path.parent), name="", version=run.path.name))
        return
    _fill(options, "save_dir", str(run.root), (IN_RUN,))
    _fill(options, "name", run.experiment, (None, OF_LIGHTNING))
    _fill(options, "version", run.version, (None,))


def _configure_wandb(options: Namespace, run: RunDir) -> None:
    _fill(options, "save_dir", str(run.path), (None, ".") if options.get("dir") is None else ())
    _fill(options, "name", f"{run.experiment}/{run.version}", (None,))
    if options.get("version") is None:
        _fill(options, "id", _recorded(run, WandbLogger), (None,))


def _configure_mlflow(options: Namespace, run: RunDir) -> None:
    _fill(options, "save_dir", str(run.root / "mlruns"), (None, "./mlruns"))
    if options.get("tracking_uri") is None:
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # required by later versions of MLflow
    _fill(options, "experiment_name", run.experiment, (None, OF_LIGHTNING))
    _fill(options, "run_name", run.version, (None,))
    _fill(options, "run_id", _recorded(run, MLFlowLogger), (None,))


CONFIGURE: dict[type[Logger], Callable[[Namespace, RunDir], None]] = {
    TensorBoardLogger: _configure_files,
    CSVLogger: _configure_files,
    WandbLogger: _configure_wandb,
    MLFlowLogger: _configure_mlflow,
}
WITH_ID = {WandbLogger: "version", MLFlowLogger: "run_id"}  # attribute with the run's id


def _fill(options: Namespace, name: str, value: object, defaults: tuple) -> None:
    """Set an option that has a default value."""
    if options.get(name) in defaults:
        options[name] = value


def _recorded(run: RunDir, kind: type[Logger]) -> str | None:
    """Read the recorded id of a resumed run for a class of loggers."""
    return _read_ids(run.path / LOGGERS).get(kind.__name__) if run.is_resumed else None


def _read_ids(path: Path) -> dict[str, str]:
    """Read the ids of a run's loggers by class; empty if it has no such file.

    Raises:
        UserError: If the file is damaged.
    """
    if not path.is_file():
        return {}
    with as_user_error(f"{path} is damaged"):
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or not all(isinstance(one, str) for one in found.values()):
            raise ValueError("expected a mapping of logger classes to ids.")
    return found


@rank_zero_only
def record_ids(loggers: Iterable[Logger], folder: Path) -> None:
    """Write the ids that loggers assigned to the run to `loggers.json`, for resuming."""
    found = [(kind, getattr(one, name)) for kind, name in WITH_ID.items() for one in loggers if isinstance(one, kind)]
    if found:
        path = folder / LOGGERS
        before = _read_ids(path)  # includes loggers that this resume does not use
        write_json(path, before | {kind.__name__: run_id for kind, run_id in found})


@rank_zero_only
def truncate_curves(loggers: Iterable[Logger], step: int, is_due: bool) -> None:
    """Remove logged rows and points after the step of a resumed run.

    CSV loggers append to their earlier rows, which Lightning would delete. TensorBoard hides points after the step.

    Args:
        loggers: All loggers.
        step: The step that the run is resumed from.
        is_due: Whether the validation of that step is repeated.
    """
    for logger in loggers:
        hide_points_after(logger, step)
        if isinstance(logger, CSVLogger):
            path = Path(logger.log_dir) / "metrics.csv"
            names, rows = _rows_until(path, step, is_due)
            writer = logger.experiment
            if names:
                text = io.StringIO(newline="")
                table = csv.DictWriter(text, names)
                table.writeheader()
                table.writerows(rows)
                with atomic_write(path) as file:
                    file.write(text.getvalue().encode())
                writer.metrics_keys = names


def _rows_until(path: Path, step: int, is_due: bool) -> tuple[list[str], list[dict[str, str]]]:
    """Read the complete rows of a CSV log up to a step, without its validation if that is repeated.

    After a kill the last row can be incomplete.

    Raises:
        UserError: If the log is damaged in another way.
    """
    if not path.is_file():
        return [], []
    with as_user_error(f"{path} is damaged"):
        whole, end, _ = path.read_text().rpartition("\n")
        table = csv.DictReader(io.StringIO(whole + end))
        last = {True: step, False: step - is_due}  # for training rows, and for validations
        rows = [row for row in table if not row["step"] or int(row["step"]) <= last[_is_of_training(row)]]
        if any(None in row for row in rows):
            raise ValueError("a row is longer than the header.")
    return list(table.fieldnames or []), rows


def _is_of_training(row: dict[str, str]) -> bool:
    """Whether a row was logged by a training step, not by a validation."""
    return any(value for name, value in row.items() if name is not None and name.startswith("train/"))


@rank_zero_only
def finish(loggers: Iterable[Logger]) -> None:
    """Finish runs of Weights & Biases; otherwise the next run in this process would continue them."""
    for logger in loggers:
        finish_started_run(logger)


def describe(logger: Logger, shorten: Callable[[str], Path]) -> str:
    """Return the location of a logger's results, or the command that shows them.

    Args:
        logger: The logger.
        shorten: Shortens a path.
    """
    if isinstance(logger, TensorBoardLogger):
        return f"tensorboard --logdir {shorten(logger.log_dir)}"
    if isinstance(logger, CSVLogger):
        return str(shorten(str(Path(logger.log_dir) / "metrics.csv")))
    if isinstance(logger, MLFlowLogger):
        return f"mlflow run {logger.run_id}"
    if isinstance(logger, WandbLogger):
        return logger.experiment.url or f"wandb sync {shorten(str(logger.experiment.dir)).parent}"
    return f"{type(logger).__name__} {logger.name} {logger.version}"
