"""The folder of a run: created by one process, locked during training, and removed if the run fails at its start.

    ROOT/NAME/version_N/
        checkpoints/       the newest and the best state
        config.yaml, environment.json, costs.json, loggers.json
        validate/, test/, predict/      results of these commands for the run's checkpoints

It depends only on `trainer.default_root_dir` and `--name`; loggers write into it (`dctrain.loggers`).
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import is_initialized

from .callbacks.costs import COSTS
from .distributed.rendezvous import watch_start
from .lightning_internals import HookedTrainer
from .utils.files import file_lock

LOCK = ".lock"
CONFIG, RESUMED_CONFIG, ENVIRONMENT = "config.yaml", "config-resumed.yaml", "environment.json"
LOGGERS = "loggers.json"
OF_THE_START = (
    LOCK,
    COSTS,
    CONFIG,
    RESUMED_CONFIG,
    ENVIRONMENT,
    LOGGERS,
    "hparams.yaml",
)  # files that exist at the start of every run
WANDB = "wandb"  # folder of Weights & Biases


class RunDir(NamedTuple):
    """The folder of a run.

    Attributes:
        path: The folder; a path that does not exist on ranks other than the first.
        root: Folder of all experiments.
        experiment: Name of the experiment.
        version: Name of the run within the experiment.
        is_resumed: Whether the run is resumed.
    """

    path: Path
    root: Path
    experiment: str
    version: str
    is_resumed: bool = False


class RunTrainer(HookedTrainer):
    """A trainer whose `log_dir` is the folder of its run, independent of its loggers.

    Attributes:
        run_dir: The folder; None for Lightning's default.
    """

    run_dir: RunDir | None = None
    _log_dir: str | None = None  # set after the process group is initialized

    def before_run(self) -> None:
        """Report a process group that does not start."""
        watch_start(self)

    @property
    def log_dir(self) -> str | None:
        """The first rank's folder of the run. The first access is a collective operation: required on all ranks."""
        if self.run_dir is None:
            return super().log_dir
        if self._log_dir is None:
            folder = self.strategy.broadcast(str(self.run_dir.path))
            if not is_initialized():
                return folder
            self._log_dir = folder
        return self._log_dir


@contextmanager
def new_run(experiment: Path, has_trained: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """Create and lock `experiment/version_N` for the body, with the first free N.

    The folder is removed if the body fails before any training or writing, or writes nothing. Only the first rank
    creates it; the others receive its path later.
    """
    if rank_zero_only.rank:
        yield experiment / "version_of_rank_0"
        return
    folder = _claim(experiment)
    try:
        with locked_run(folder):
            yield folder
    except BaseException:
        if not has_trained() and all(_is_of_the_start(folder, path) for path in folder.rglob("*") if path.is_file()):
            _remove(folder)
        raise
    if all(path.name == LOCK for path in folder.iterdir()):
        _remove(folder)


def _is_of_the_start(folder: Path, path: Path) -> bool:
    """Whether a file exists at the start of every run."""
    is_of_wandb = path.relative_to(folder).parts[0] == WANDB
    return is_of_wandb or path.name in OF_THE_START or path.name.startswith("events.")


def _claim(experiment: Path) -> Path:
    """Create the first free version folder; mkdir succeeds in one process only."""
    taken = [path.name.removeprefix("version_") for path in experiment.glob("version_*")]
    for number in count(max((int(name) for name in taken if name.isdecimal()), default=-1) + 1):
        try:
            (experiment / f"version_{number}").mkdir(parents=True)
        except FileExistsError:
            continue
        return experiment / f"version_{number}"


def _remove(folder: Path) -> None:
    """Remove a run, and its experiment's folder if it is empty."""
    shutil.rmtree(folder)
    with suppress(OSError):  # it has other runs, or was removed by another process
        folder.parent.rmdir()


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Lock a run's folder during the body. The lock of a dead process is released by the system.

    Raises:
        UserError: If another process has locked it.
    """
    if rank_zero_only.rank:
        yield
        return
    with file_lock(folder / LOCK, f"the run {folder} is being trained by another process."):
        yield
