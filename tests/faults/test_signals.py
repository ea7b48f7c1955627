"""SIGTERM in every phase of a run: the run ends soon, and the resumed run matches an uninterrupted run."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dctrain.callbacks.checkpoints import LastCheckpoint
from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from tests.dctrain.commands import ROOT, record
from tests.dctrain.recorder import Killed, read
from tests.dcvision.commands import run, small, spawn


class Tell(Callback):
    """Send SIGTERM to this process in a phase of the run.

    Args:
        phase: "sanity check", "start", "validation", "step" or "saving".
        step: Minimum number of steps before the signal.
    """

    def __init__(self, phase: str, step: int = 0) -> None:
        self.phase, self.step = phase, step

    def _tell(self, trainer, phase: str) -> None:
        if phase == self.phase and trainer.global_step >= self.step:
            self.phase = "told"
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        if batch_idx == 2 or trainer.sanity_checking:
            self._tell(trainer, "sanity check" if trainer.sanity_checking else "validation")
        elif self.phase == "told" and not trainer.sanity_checking:
            raise AssertionError("the validation went on")

    def on_train_start(self, trainer, pl_module) -> None:
        self._tell(trainer, "start")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self._tell(trainer, "step")

    def on_save_checkpoint(self, trainer, pl_module, checkpoint) -> None:
        self._tell(trainer, "saving")


def told(phase: str, step: int = 0) -> list[str]:
    options = [f"--trainer.callbacks.phase={phase}", f"--trainer.callbacks.step={step}"]
    return ["--trainer.callbacks+=tests.faults.test_signals.Tell", *options]


def curves(folder: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(folder)).Reload()
    tags = ("train/loss", "train/grad_norm", "val/loss", "val/top1")
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in tags}


IN_STEPS = ["--trainer.val_check_interval=4", "--trainer.max_epochs=2"]
BY_EPOCHS = ["--trainer.max_epochs=2"]
STOPS = [("validation", 8, IN_STEPS), ("step", 9, BY_EPOCHS)]
MORE_STOPS = [("validation", 0, IN_STEPS), ("validation", 10, BY_EPOCHS), ("step", 3, IN_STEPS)]
MORE_STOPS += [("saving", 6, ["--checkpoint_every_n_steps=3", *BY_EPOCHS])]


@pytest.mark.parametrize(
    ("phase", "step", "extra"), [*STOPS, *(pytest.param(*stop, marks=pytest.mark.slow) for stop in MORE_STOPS)]
)
def test_stopped_and_resumed_run_matches_uninterrupted_run(shards, tmp_path, capsys, phase, step, extra):
    whole, parts = (small(shards, tmp_path / name) + extra for name in ("whole", "parts"))
    run("fit", *whole, *record(tmp_path / "whole"))
    run("fit", *parts, *told(phase, step), *record(tmp_path / "parts"))
    assert "stopped by SIGTERM; continue with --resume" in capsys.readouterr().out
    check_resumed(parts, tmp_path)


class Crash(Callback):
    """End the run in the validation after step 8, without saving."""

    def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
        if trainer.global_step == 8:
            raise ArithmeticError


@pytest.mark.slow
def test_validation_is_repeated_after_crash_in_validation(shards, tmp_path):
    whole, parts = (
        [*small(shards, tmp_path / name), *IN_STEPS, "--checkpoint_every_n_steps=4"] for name in ("whole", "parts")
    )
    run("fit", *whole, *record(tmp_path / "whole"))
    with pytest.raises(ArithmeticError):
        run("fit", *parts, "--trainer.callbacks+=tests.faults.test_signals.Crash", *record(tmp_path / "parts"))
    check_resumed(parts, tmp_path)


def check_resumed(parts: list[str], tmp_path: Path) -> None:
    """Resume the run in `parts` and compare it with the run in `whole`."""
    folder = tmp_path / "parts/t/version_0"
    run("fit", *parts, f"--resume={folder}", *record(tmp_path / "parts"))
    assert read(tmp_path / "parts") == read(tmp_path / "whole")
    assert curves(folder) == curves(tmp_path / "whole/t/version_0")
    best = [sorted(path.name for path in (tmp_path / name).rglob("*.ckpt")) for name in ("whole", "parts")]
    assert best[0] == best[1]
    ends = [load_checkpoint(newest_checkpoint(tmp_path / name))["state_dict"] for name in ("whole", "parts")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


@pytest.mark.parametrize("phase", ["sanity check", "start"])
def test_sigterm_before_first_step_ends_run_without_folder(shards, tmp_path, capsys, phase):
    run("fit", *small(shards, tmp_path), *told(phase), *record(tmp_path / "steps"))
    assert "stopped by SIGTERM; nothing has been trained yet" in capsys.readouterr().out
    assert not list(tmp_path.glob("steps*")) and not (tmp_path / "t").exists()


@pytest.mark.long
@pytest.mark.parametrize("wait", range(0, 30, 3))
def test_sigterm_at_any_time_ends_run_within_30_seconds(shards, tmp_path, wait):
    """The model is compiled; the signals arrive during preparation, compilation, training and validation."""
    command = [sys.executable, "-m", "dcvision", "fit", *small(shards, tmp_path), "--model.compile=true"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    time.sleep(wait)
    process.terminate()
    start = time.monotonic()
    said, _ = process.communicate(timeout=60)
    assert time.monotonic() - start < 30
    assert process.returncode in (0, -signal.SIGTERM) and b"Traceback" not in said, said


def _validated(root: Path) -> tuple[list[str], dict[str, str]]:
    """Return the names of a run's checkpoints, and its logged validation results by step."""
    (version,) = (root / "t").iterdir()
    rows = csv.DictReader((version / "metrics.csv").open())
    curve = {row["step"]: row["val/top1"] for row in rows if row.get("val/top1")}
    return sorted(path.name for path in (version / "checkpoints").iterdir()), curve


@pytest.mark.parametrize("length", [["--trainer.max_steps=8", "--trainer.max_epochs=-1"], ["--trainer.max_epochs=1"]])
def test_run_killed_in_last_validation_repeats_it_on_resume(shards, tmp_path, length):
    """The last step is a multiple of the number of steps between checkpoints."""
    often = ["--trainer.val_check_interval=2", "--checkpoint_every_n_steps=2", "--trainer.logger=CSVLogger"]
    last = 8 if "max_steps" in length[0] else 10
    fit = ["fit", *small(shards, tmp_path / "killed"), *often, *length]
    with pytest.raises(Killed):
        run(*fit, "--trainer.callbacks+=tests.dctrain.recorder.KilledInValidation", f"--trainer.callbacks.step={last}")
    assert str(last) not in _validated(tmp_path / "killed")[1]
    run(*fit, "--resume=latest")
    run("fit", *small(shards, tmp_path / "whole"), *often, *length)
    assert _validated(tmp_path / "killed") == _validated(tmp_path / "whole")
    assert str(last) in _validated(tmp_path / "whole")[1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a short run on the digits."""
    root = tmp_path_factory.mktemp("signals")
    run("fit", *digits(root), "--trainer.max_epochs=-1", "--trainer.max_steps=2")
    return root / "t/version_0"


def digits(root: Path) -> list[str]:
    sets = ["--data.train=digits", "--data.val=digits", "--data.num_classes=10", "--data.image_size=8"]
    return [*small("", root), *sets]


ENDING = ["--trainer.callbacks+=tests.dctrain.recorder.EndedInEvaluation"]
ENDING += [f"--trainer.callbacks.signum={int(signal.SIGTERM)}"]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["validate", "predict"])
def test_evaluation_ended_by_sigterm_has_no_result(trained, tmp_path, command):
    out = [f"--out={tmp_path}/p.csv"] if command == "predict" else []
    ended = spawn(command, *digits(tmp_path), f"--checkpoint={trained}", *out, *ENDING)
    assert ended.returncode == -signal.SIGTERM and "stopped by SIGTERM; there is no result" in ended.stderr
    assert "Traceback" not in ended.stderr and "val/top1" not in ended.stdout and not (tmp_path / "p.csv").exists()


@pytest.mark.long
@pytest.mark.parametrize("command", ["validate", "predict"])
def test_evaluation_ends_when_one_of_its_processes_ends(trained, tmp_path, command):
    out = [f"--out={tmp_path}/p.csv"] if command == "predict" else []
    two = ["--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.callbacks.rank=1"]
    ended = spawn(command, *digits(tmp_path), f"--checkpoint={trained}", *out, *ENDING, *two)
    assert ended.returncode == 2, ended.stderr
    assert "another process of this run has died" in ended.stderr and not list(tmp_path.glob("p*.csv"))


def test_epochs_are_counted_after_kill_at_end_of_postponed_validation(shards, tmp_path, monkeypatch):
    """The kill occurs after the best checkpoint of the postponed validation is saved, before the last checkpoint."""
    fit = ["fit", *small(shards, tmp_path), "--trainer.max_epochs=-1", "--trainer.max_steps=20", "--resume=latest"]
    fit.append("--trainer.logger=CSVLogger")
    run(*fit, *record(tmp_path / "steps", signum=int(signal.SIGTERM), at=9))

    def killed(*args, **options):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(LastCheckpoint, "save", killed)
        with pytest.raises(Killed):
            run(*fit)
    run(*fit)
    rows = list(csv.DictReader((tmp_path / "t/version_0/metrics.csv").open()))
    epochs = {int(row["step"]): float(row["epoch"]) for row in rows if row["train/loss"]}
    assert epochs == {step: (step - 1) // 10 for step in range(1, 21)}
    assert [row["step"] for row in rows if row["val/top1"]] == ["10", "20"]
