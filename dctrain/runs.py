"""The folder of a run: claimed by one process, held while it runs, and gone again if nothing came of it."""

import csv
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only

from .callbacks.costs import COSTS
from .files import held

LOCK = ".lock"
OF_THE_START = (LOCK, COSTS, "config.yaml", "environment.json", "hparams.yaml")  # files that every run begins with


@contextmanager
def new_run(experiment: Path, has_trained: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """Claim `experiment/version_N` for the body, with the first N that is free, and hold it.

    If the body fails before anything was trained or written, or ends without a trace, the folder is removed. Of several
    ranks the first alone claims; the others ask it where it logs.
    """
    if rank_zero_only.rank:
        yield experiment / "version_of_rank_0"
        return
    folder = _claim(experiment)
    try:
        with held_run(folder):
            yield folder
    except BaseException:
        if not has_trained() and all(_is_of_the_start(path) for path in folder.rglob("*") if path.is_file()):
            _remove(folder)
        raise
    if all(path.name == LOCK for path in folder.iterdir()):
        _remove(folder)


def _is_of_the_start(path: Path) -> bool:
    """Tell whether a file is one that every run has before it does anything."""
    return path.name in OF_THE_START or path.name.startswith("events.")


def _claim(experiment: Path) -> Path:
    """Make the first version that there is not yet: making a folder succeeds for one process alone."""
    experiment.mkdir(parents=True, exist_ok=True)
    taken = [path.name.removeprefix("version_") for path in experiment.glob("version_*")]
    for number in count(max((int(name) for name in taken if name.isdigit()), default=-1) + 1):
        try:
            (experiment / f"version_{number}").mkdir()
        except FileExistsError:
            continue
        return experiment / f"version_{number}"


def _remove(folder: Path) -> None:
    """Remove a run, and the folder of its experiment if it was the only one."""
    shutil.rmtree(folder)
    if not any(folder.parent.iterdir()):
        folder.parent.rmdir()


@contextmanager
def held_run(folder: Path) -> Iterator[None]:
    """Hold a run's folder: a second process that wants it is refused. The lock of a process that died holds nobody.

    Raises:
        UserError: If another process holds it.
    """
    if rank_zero_only.rank:
        yield
        return
    with held(folder / LOCK, f"the run {folder} is being trained by another process."):
        yield


def go_on_in(folder: Path, logger: Logger) -> None:
    """Let a logger of files that a user chose go on in the folder of a run that is resumed."""
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        logger._root_dir = logger._save_dir = str(folder.parent)
        logger._name, logger._version = "", folder.name
    if isinstance(logger, CSVLogger) and not rank_zero_only.rank:
        _append_to(folder / "metrics.csv", logger)


def _append_to(path: Path, logger: CSVLogger) -> None:
    """Keep the rows so far, which the logger would remove."""
    before = path.read_text() if path.is_file() else ""
    writer = logger.experiment
    if before:
        path.write_text(before)
        writer.metrics_keys = next(csv.reader(before.splitlines()))
