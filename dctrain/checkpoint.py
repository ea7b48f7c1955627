"""Checkpoints that survive a kill at any moment, and finding the newest one of a run."""

import re
import zipfile
from pathlib import Path

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from .errors import UserError, told_as
from .files import written_whole

RESUMED = {"state_dict", "optimizer_states", "lr_schedulers", "loops", "global_step", "epoch"}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all."""

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        """Save `checkpoint` to the local file `path`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with written_whole(path) as file:
                torch.save(checkpoint, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # what torch's writer makes of a full disk
                raise OSError(error.__context__.errno, error.__context__.strerror, str(path)) from error
            raise


def find_checkpoint(path: str) -> Path:
    """Resolve what a user names: a checkpoint, or a run's folder, of which the newest checkpoint is taken.

    Raises:
        UserError: If there is none.
    """
    start = Path(path)
    if start.is_file():
        return start
    if not start.is_dir():
        raise UserError(f"no checkpoint: {path} does not exist; accepted: a .ckpt file or the folder of a run.")
    found = newest_checkpoint(start)
    if found is None:
        raise UserError(f"no checkpoint: no .ckpt file below {path}.")
    return found


def newest_checkpoint(folder: Path) -> Path | None:
    """Find the newest checkpoint below a folder, that there need not be."""
    return max(folder.rglob("*.ckpt"), key=lambda p: (p.stat().st_mtime_ns, _step(p)), default=None)


def _step(path: Path) -> int:
    """Read the training step from a file name such as `last-step=120.ckpt`."""
    match = re.search(r"step=(\d+)", path.name)
    return int(match[1]) if match else -1


def run_folder(checkpoint: Path) -> Path | None:
    """Return the folder of the run that wrote `RUN/checkpoints/NAME.ckpt`, or None if the file lies elsewhere."""
    return checkpoint.parent.parent if checkpoint.parent.name == "checkpoints" else None


def make_folder(path: str) -> Path:
    """Make a folder for results, unless it exists.

    Raises:
        UserError: If it cannot be made.
    """
    folder = Path(path)
    with told_as(f"the folder {path} cannot be made"):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def load_checkpoint(path: Path) -> dict:
    """Read a checkpoint safely (tensors and plain values only), its checksums compared.

    Raises:
        UserError: If it is not a whole checkpoint.
    """
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()  # torch writes a CRC-32 with every tensor, and does not look at it
        content = None if damaged else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's message advises to load it unsafely
        raise UserError(f"{path} is no readable checkpoint ({type(error).__name__}).") from error
    if damaged:
        raise UserError(f"{path} is damaged: {damaged} in it is not what was written.")
    if not isinstance(content, dict):
        raise UserError(f"{path} is no checkpoint: it holds a {type(content).__name__}.")
    return content


def check_resumable(path: Path) -> None:
    """Check that a run can be taken up from a checkpoint.

    Raises:
        UserError: If it is not a whole one, or lacks the state of a run.
    """
    missing = sorted(RESUMED - load_checkpoint(path).keys())
    if missing:
        raise UserError(f"{path} cannot be resumed from: it has no {', '.join(missing)}.")
