"""Callbacks for the newest and the best checkpoint of a run."""

import re
from pathlib import Path

import lightning as L
from lightning.pytorch.callbacks import Callback

from ..distributed.strategy import FSDP2Strategy
from ..errors import DivergenceError, UserError
from ..lightning_internals import FiniteCheckpoint
from ..utils.files import remove_atomically


class LastCheckpoint(Callback):
    """Saves the full state at the start, every n steps, at the end, and on a stop.

    It writes `checkpoints/last-step=N.ckpt` in the run's folder and then removes earlier ones, so that a complete
    checkpoint exists at any time. While steps are skipped because of non-finite gradients, it saves only on a stop.
    Non-finite weights are never saved, so that a diverging run keeps its last finite checkpoint.

    Args:
        every_n_steps: Optimizer steps between checkpoints.

    Attributes:
        newest: The newest checkpoint, to resume from; None before the first.
    """

    def __init__(self, every_n_steps: int = 500) -> None:
        if every_n_steps < 1:
            raise UserError(f"checkpoint_every_n_steps={every_n_steps} must be at least 1.")
        self.every_n_steps = every_n_steps
        self.newest: Path | None = None
        self._outdated: set[Path] = set()

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict) -> None:
        """Use the resumed checkpoint as the newest; older ones in the folder are removed after the next save."""
        self.newest = Path(trainer.ckpt_path)
        self._outdated = _of_before(trainer, r"last-step=\d+\.ckpt")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save before the first step of a new run."""
        if trainer.ckpt_path is None:
            self.save(trainer)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs, batch, batch_idx) -> None:
        """Save every n optimizer steps.

        The last step of `max_steps` is saved only at the end, after its validation: a run resumed from its last step
        would not be validated, so a kill during that validation would lose it.
        """
        if trainer.global_step % self.every_n_steps or is_accumulating(trainer, batch_idx):
            return
        if 0 < trainer.max_steps <= trainer.global_step:
            return
        if not pl_module.skipped_in_a_row:
            self.save(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Save the final state, and wait for asynchronous saving."""
        newest = self.save(trainer)
        if isinstance(trainer.strategy, FSDP2Strategy):
            trainer.strategy.folders.finish()
        self._remove_outdated(trainer, {newest})

    def _path(self, trainer: L.Trainer) -> Path:
        return Path(trainer.log_dir) / "checkpoints" / f"last-step={trainer.global_step}.ckpt"

    def save(self, trainer: L.Trainer, again: bool = False) -> Path:
        """Save now, on all ranks, unless this step is already saved; return the path.

        Args:
            trainer: The trainer.
            again: Save even if this step is already saved.

        Raises:
            DivergenceError: If a weight is not finite.
        """
        path = self._path(trainer)
        if again or path != self.newest:
            if not _has_finite_weights(trainer):
                raise DivergenceError(
                    f"step {trainer.global_step}: weights are not finite; nothing was saved.", self.newest
                )
            for logger in trainer.loggers:
                logger.save()  # logs are at least as new as the checkpoint
            trainer.save_checkpoint(path, weights_only=False)
            is_saving = isinstance(trainer.strategy, FSDP2Strategy) and trainer.strategy.folders.is_saving
            self._outdated.add(path)
            self._remove_outdated(trainer, {path, self.newest} if is_saving else {path})
            self.newest = path
        return path

    def _remove_outdated(self, trainer: L.Trainer, kept: set[Path]) -> None:
        for old in self._outdated - kept if trainer.is_global_zero else ():
            remove_atomically(old)
        self._outdated &= kept

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Add the newest checkpoint to the error of a diverged run."""
        if isinstance(exception, DivergenceError):
            exception.checkpoint = self.newest


def _of_before(trainer: L.Trainer, name: str) -> set[Path]:
    """Return the checkpoints of a name in the folder of a resumed run, including partially written ones."""
    folder = Path(trainer.log_dir) / "checkpoints"
    if Path(trainer.ckpt_path).parent.resolve() != folder.resolve():
        return set()
    found = folder.glob("*")
    return {path for path in found if re.fullmatch(rf"(before-)?{name}(\.\d+\.partial)?", path.name)}


def _has_finite_weights(trainer: L.Trainer) -> bool:
    """Whether the weights of all ranks are finite."""
    parts = (p.to_local() if hasattr(p, "to_local") else p for p in trainer.lightning_module.parameters())
    return trainer.strategy.reduce_boolean_decision(all(bool(part.isfinite().all()) for part in parts), all=True)


def is_accumulating(trainer: L.Trainer, batch_idx: int) -> bool:
    """Whether gradients are being accumulated; a checkpoint would lose them."""
    return bool((batch_idx + 1) % trainer.accumulate_grad_batches) and not trainer.is_last_batch


PATHS_OF_BEST = ("best_model_path", "kth_best_model_path", "last_model_path")


class BestCheckpoint(FiniteCheckpoint):
    """Lightning's `ModelCheckpoint`, which also finds its files after the run's folder was moved or renamed.

    A non-finite score is never the best.
    """

    _outdated: set[Path] = frozenset()

    def after_best(self, trainer: L.Trainer) -> None:
        """Remove the files that the resumed checkpoint does not know."""
        if self.best_k_models:
            for old in self._outdated - set(map(Path, self.best_k_models)) if trainer.is_global_zero else ():
                remove_atomically(old)
            self._outdated = set()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find best checkpoints in this folder that the resumed checkpoint does not know."""
        super().on_train_start(trainer, pl_module)
        if trainer.ckpt_path is not None:
            self._outdated = _of_before(trainer, r"best-(epoch|step)=\d+-(top1|loss)=[\d.]+\.ckpt")

    def load_state_dict(self, state_dict: dict) -> None:
        """Restore the best checkpoint, unless its file is not in this run's folder."""

        def here(path: str) -> str:
            return str(Path(self.dirpath) / Path(path).name) if path else path

        if not Path(here(state_dict["best_model_path"])).exists():
            return
        paths = {name: here(state_dict[name]) for name in PATHS_OF_BEST}
        best = {here(path): score for path, score in state_dict["best_k_models"].items()}
        super().load_state_dict(state_dict | paths | {"best_k_models": best, "dirpath": self.dirpath})
