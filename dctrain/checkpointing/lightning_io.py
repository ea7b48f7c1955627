"""Lightning plugin that writes and reads single-process checkpoints."""

from pathlib import Path

from lightning.fabric.plugins import TorchCheckpointIO

from ..utils.files import remove_atomically
from .checkpoint import load_checkpoint
from .single_file import write_file


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes single-process checkpoints atomically, and reads single-file and sharded ones.

    Args:
        reads_optimizer: Whether to load the optimizer's state.
    """

    def __init__(self, *, reads_optimizer: bool = True) -> None:
        self.reads_optimizer = reads_optimizer

    def save_checkpoint(self, checkpoint: dict, path, storage_options=None) -> None:
        """Save `checkpoint` to the local file `path`."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(checkpoint, path)

    def load_checkpoint(self, path, map_location=None, weights_only: bool | None = None) -> dict:
        """Load the checkpoint `path` to the CPU."""
        return load_checkpoint(Path(path), with_optimizer=self.reads_optimizer)

    def remove_checkpoint(self, path) -> None:
        """Remove a checkpoint."""
        remove_atomically(Path(path))
