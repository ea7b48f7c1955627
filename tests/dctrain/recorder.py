"""Callbacks that record training steps, end the process at a given step, or change the precision."""

import json
import os
import signal
import time

from lightning.pytorch.callbacks import Callback


class Recorder(Callback):
    """Append one line per training step to `FILE-rankN`: global batch number, loss bits, samples and learning rate.

    Args:
        file: Path prefix of the records.
        signum: Signal that the process sends to itself.
        at: Batch before which the signal is sent, counted over all epochs; None for never.
        rank: Rank that sends the signal.
    """

    def __init__(self, file: str, signum: int = int(signal.SIGTERM), at: int | None = None, rank: int = 0) -> None:
        self.file, self.signum, self.at, self.rank = file, signum, at, rank

    def _number(self, trainer) -> int:
        return trainer.fit_loop.epoch_loop.batch_progress.total.processed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if self._number(trainer) == self.at and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        line = {
            "batch": self._number(trainer) - 1,
            "loss": outputs["loss"].item().hex(),
            "samples": batch.samples if hasattr(batch, "samples") else batch.names,
        }
        line["lr"] = trainer.optimizers[0].param_groups[0]["lr"]
        with open(f"{self.file}-rank{trainer.global_rank}", "a") as file:
            file.write(json.dumps(line) + "\n")


def read(file, rank: int = 0) -> dict[int, dict]:
    """Return the records by batch number; a batch trained twice (after a kill) keeps the later record."""
    with open(f"{file}-rank{rank}") as lines:
        return {record["batch"]: record for record in map(json.loads, lines)}


def losses(file, ranks: int) -> list[float]:
    """Return the mean loss over ranks of every batch."""
    read_ranks = [read(file, rank) for rank in range(ranks)]
    return [sum(float.fromhex(r[b]["loss"]) for r in read_ranks) / ranks for b in sorted(read_ranks[0])]


class EndAfterEpoch(Callback):
    """Stop a run after its first epoch, regardless of its schedule."""

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        trainer.should_stop = True


class EndedInEvaluation(Callback):
    """Send a signal to the process of one rank in the second batch of an evaluation."""

    def __init__(self, signum: int, rank: int = 0) -> None:
        self.signum, self.rank = signum, rank

    def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
        if batch_idx == 1 and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.signum)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


class InFloat64(Callback):
    """Cast the module to float64, also under FSDP2, where the trainer does not support this precision."""

    def setup(self, trainer, pl_module, stage: str) -> None:
        pl_module.double()


class SlowValidation(Callback):
    """Sleep for two seconds at the start of each validation."""

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        if batch_idx == 0 and not trainer.sanity_checking:
            time.sleep(2)


class Killed(BaseException):
    """Exception that ends a run like a kill, without saving anything."""


class KilledInValidation(Callback):
    """Raise `Killed` in the validation after a step.

    Args:
        step: Number of optimizer steps before the validation.
    """

    def __init__(self, step: int) -> None:
        self.step = step

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        if trainer.global_step == self.step and not trainer.sanity_checking:
            raise Killed


class ShardRecorder(Callback):
    """Append to `FILE-rankN`, per training batch: the dtypes of the gathered parameters of a block, and whether
    gradients have been reduced to shards.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.dtypes: set[str] = set()

    def on_train_start(self, trainer, pl_module) -> None:
        attention = pl_module.model.blocks[0].attn  # inside a block, which is gathered as one unit
        attention.register_forward_hook(lambda m, *_: self.dtypes.update(str(p.dtype) for p in m.parameters()))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        has_gradients = any(p.grad is not None for p in pl_module.model.parameters())
        line = {"gathered": sorted(self.dtypes), "has_gradients": has_gradients}
        with open(f"{self.file}-rank{trainer.global_rank}", "a") as file:
            file.write(json.dumps(line) + "\n")
