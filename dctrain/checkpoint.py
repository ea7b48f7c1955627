"""Checkpoints that survive a kill at any moment, and finding the newest one of a run."""

import re
from pathlib import Path

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from .errors import UserError, told_as
from .files import written_whole


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint whole or not at all."""

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        """Save `checkpoint` to the local file `path`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as file:
            torch.save(checkpoint, file)


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
    found = sorted(start.rglob("*.ckpt"), key=lambda p: (p.stat().st_mtime_ns, _step(p)))
    if not found:
        raise UserError(f"no checkpoint: no .ckpt file below {path}.")
    return found[-1]


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
    """Read a checkpoint safely (tensors and plain values only).

    Raises:
        UserError: If it is not a whole checkpoint.
    """
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's message advises to load it unsafely
        raise UserError(f"{path} is no readable checkpoint ({type(error).__name__}).") from error
