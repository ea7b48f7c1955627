"""The folder of a run: claimed by one process, locked while it trains, and removed if nothing came of it.

    ROOT/NAME/version_N/
        checkpoints/       the newest and the best state
        config.yaml, environment.json, costs.json, loggers.json
        validate/, test/, predict/      what these commands write of the run's checkpoints

It depends on `trainer.default_root_dir` and `--name` alone; loggers write into it (`dctrain.loggers`).
"""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

import lightning as L
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import is_initialized

from .callbacks.costs import COSTS
from .distributed.rendezvous import watch_start
from .utils.files import held

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
)  # files that every run begins with
WANDB = "wandb"  # the folder that Weights & Biases makes


class RunDir(NamedTuple):
    """The folder of a run.

    Attributes:
        path: The folder; of ranks but the first, a path that does not exist.
        root: Folder of all experiments.
        experiment: The name of the experiment.
        version: The name of the run within it.
        is_resumed: Whether an earlier process has begun the run.
    """

    path: Path
    root: Path
    experiment: str
    version: str
    is_resumed: bool = False


class RunTrainer(L.Trainer):
    """A trainer that writes to the folder of its run, whatever its loggers are.

    Attributes:
        run_dir: The folder; None leaves the choice to Lightning.
    """

    run_dir: RunDir | None = None
    _log_dir: str | None = None  # once the ranks know each other

    def _run(self, *args, **kwargs):
        watch_start(self)
        return super()._run(*args, **kwargs)

    @property
    def log_dir(self) -> str | None:
        """The folder of the run, of the first rank. The first time it is a broadcast: all ranks must ask."""
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
    """Claim `experiment/version_N` for the body, with the first N that is free, and lock it.

    If the body fails before anything was trained or written, or ends without a trace, the folder is removed. Of several
    ranks the first alone claims; the others ask it where it logs.
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
    """Tell whether a file is one that every run has before it does anything."""
    is_of_wandb = path.relative_to(folder).parts[0] == WANDB
    return is_of_wandb or path.name in OF_THE_START or path.name.startswith("events.")


def _claim(experiment: Path) -> Path:
    """Make the first version that does not exist yet: making a folder succeeds for one process alone."""
    taken = [path.name.removeprefix("version_") for path in experiment.glob("version_*")]
    for number in count(max((int(name) for name in taken if name.isdecimal()), default=-1) + 1):
        try:
            (experiment / f"version_{number}").mkdir(parents=True)
        except FileExistsError:
            continue
        return experiment / f"version_{number}"


def _remove(folder: Path) -> None:
    """Remove a run, and the folder of its experiment if it was the only one."""
    shutil.rmtree(folder)
    with suppress(OSError):  # other runs are in it, or another process has removed it
        folder.parent.rmdir()


@contextmanager
def locked_run(folder: Path) -> Iterator[None]:
    """Lock a run's folder: a second process that wants it is refused. The lock of a dead process does not count.

    Raises:
        UserError: If another process has locked it.
    """
    if rank_zero_only.rank:
        yield
        return
    with held(folder / LOCK, f"the run {folder} is being trained by another process."):
        yield
