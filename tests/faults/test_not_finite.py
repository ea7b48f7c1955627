"""Non-finite losses and gradients: a few steps are skipped, many end the run, and finite checkpoints are kept."""

import math
import signal
from pathlib import Path
from typing import ClassVar

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from dctrain.checkpointing.checkpoint import load_checkpoint
from dctrain.training_module import MAX_SKIPPED
from dcvision import ImageClassifier, ImageDataModule
from tests.dctrain.commands import record
from tests.dcvision.commands import run, small, spawn

ARGUMENTS = ["--trainer.max_epochs=2", "--checkpoint_every_n_steps=1", "--trainer.num_sanity_val_steps=0"]


class NotFinite(Callback):
    """Add a number to the losses of some steps.

    Args:
        first: First of these steps.
        last: Last of these steps.
        value: Number to add.
        rank: Rank whose losses are changed.
    """

    def __init__(self, first: int, last: int, value: float = math.nan, rank: int = 0) -> None:
        self.steps, self.value, self.rank = range(first, last + 1), value, rank

    def setup(self, trainer, pl_module, stage: str) -> None:
        log_step = pl_module.log_step

        def poisoned(loss: torch.Tensor, batch_size: int) -> torch.Tensor:
            is_here = trainer.global_step in self.steps and trainer.global_rank == self.rank
            return log_step(loss + self.value if is_here else loss, batch_size)

        pl_module.log_step = poisoned


def poison(**options) -> list[str]:
    """Return arguments that add the callback."""
    options = [f"--trainer.callbacks.{name}={value}" for name, value in options.items()]
    return ["--trainer.callbacks+=tests.faults.test_not_finite.NotFinite", *options]


def last(root: Path) -> dict:
    (path,) = root.glob("t/version_0/checkpoints/last-*.ckpt")
    return load_checkpoint(path)


def is_finite(checkpoint: dict) -> bool:
    moments = [value for state in checkpoint["optimizer_states"][0]["state"].values() for value in state.values()]
    return all(value.isfinite().all() for value in (*checkpoint["state_dict"].values(), *moments))


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_few_nonfinite_steps_are_skipped_counted_and_reported(shards, tmp_path, capsys, value):
    skipped = poison(first=3, last=3 + MAX_SKIPPED - 1, value=value)
    run("fit", *small(shards, tmp_path), *ARGUMENTS, *skipped)
    assert (
        f"step 3: the loss or its gradient is not finite; the step is skipped (1 in a row, at most {MAX_SKIPPED})"
        in (capsys.readouterr().out)
    )
    end = last(tmp_path)
    assert end["global_step"] == 20 and end["skipped_steps"] == [MAX_SKIPPED, 0] and is_finite(end)


class Watch(Callback):
    """Record the weights and optimizer moments at the start of every step."""

    seen: ClassVar[dict[int, list[torch.Tensor]]] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        moments = (value for state in trainer.optimizers[0].state.values() for value in state.values())
        self.seen[trainer.global_step] = [value.detach().clone() for value in (*pl_module.parameters(), *moments)]


def test_skipped_step_preserves_weights_and_optimizer_state(shards, tmp_path):
    watching = ["--trainer.callbacks+=tests.faults.test_not_finite.Watch"]
    run("fit", *small(shards, tmp_path), *ARGUMENTS, *poison(first=4, last=4), *watching)
    assert all(torch.equal(*pair) for pair in zip(Watch.seen[4], Watch.seen[5], strict=True))
    assert not any(torch.equal(*pair) for pair in zip(Watch.seen[5], Watch.seen[6], strict=True))


@pytest.mark.parametrize("extra", [[], ["--trainer.accumulate_grad_batches=2"]], ids=["", "accumulated"])
def test_many_nonfinite_steps_end_run_and_last_finite_checkpoint_is_named(shards, tmp_path, capsys, extra):
    with pytest.raises(SystemExit) as exit_info:
        run("fit", *small(shards, tmp_path), *ARGUMENTS, *extra, *poison(first=3, last=99))
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert f"as in the {MAX_SKIPPED} steps before; training has diverged" in error
    assert error.endswith("checkpoints/last-step=3.ckpt\n") and "Traceback" not in error
    assert last(tmp_path)["global_step"] == 3 and is_finite(last(tmp_path))


def test_too_large_learning_rate_ends_run(shards, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("fit", *small(shards, tmp_path), *ARGUMENTS, "--model.lr=1e6", "--model.warmup_steps=0")
    assert "The last finite checkpoint: " in capsys.readouterr().err
    assert is_finite(last(tmp_path)) and not list(tmp_path.rglob("best-*nan*"))


class InfiniteWeight(Callback):
    """Set a weight to infinity after three steps."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        if trainer.global_step == 3:
            pl_module.model.head.bias.data[0] = math.inf


def test_infinite_weights_are_not_saved(shards, tmp_path, capsys):
    breaking = ["--trainer.callbacks+=tests.faults.test_not_finite.InfiniteWeight"]
    with pytest.raises(SystemExit):
        run("fit", *small(shards, tmp_path), *ARGUMENTS, *breaking)
    error = capsys.readouterr().err
    assert "weights are not finite; nothing was saved. The last finite checkpoint: " in error
    assert last(tmp_path)["global_step"] == 2 and is_finite(last(tmp_path))


def test_skipped_step_count_is_preserved_on_resume(shards, tmp_path, capsys):
    skipping = poison(first=2, last=99)
    run("fit", *small(shards, tmp_path), *skipping, *record(tmp_path / "a", signum=int(signal.SIGTERM), at=4))
    assert last(tmp_path)["skipped_steps"] == [3, 3]
    with pytest.raises(SystemExit):
        run("fit", *small(shards, tmp_path), *skipping, f"--resume={tmp_path}/t/version_0")
    assert "step 7: the loss or its gradient is not finite, as in the 5 steps before" in capsys.readouterr().err


@pytest.mark.long
def test_all_ranks_skip_the_same_steps(shards, tmp_path):
    two = ["--trainer.strategy=ddp", "--trainer.devices=2", "--data.batch_size=2"]
    some = spawn("fit", *small(shards, tmp_path / "some"), *ARGUMENTS, *two, *poison(first=3, last=5, rank=1))
    assert some.returncode == 0, some.stderr
    assert last(tmp_path / "some")["skipped_steps"] == [3, 0] and is_finite(last(tmp_path / "some"))
    many = spawn("fit", *small(shards, tmp_path / "many"), *ARGUMENTS, *two, *poison(first=3, last=99, rank=1))
    assert many.returncode != 0 and "training has diverged" in many.stderr
    assert last(tmp_path / "many")["global_step"] == 3


@pytest.mark.parametrize(("scale", "counted"), [(2.0, 0), (1.0, 1)])
def test_steps_skipped_by_gradient_scaler_are_not_counted(shards, tmp_path, scale, counted):
    class Scaler:
        def get_scale(self) -> float:
            return scale

    class Attach(Callback):
        def setup(self, trainer, pl_module, stage: str) -> None:
            trainer.precision_plugin.scaler = Scaler()

    data = ImageDataModule(f"shards:{shards}", f"shards:{shards}", batch_size=4)
    callbacks = [Attach(), NotFinite(0, 0)]
    trainer = L.Trainer(accelerator="cpu", max_steps=1, logger=False, enable_checkpointing=False, callbacks=callbacks)
    module = ImageClassifier()
    trainer.fit(module, data)
    assert module.skipped == counted
