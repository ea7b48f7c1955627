"""The folder of a run does not depend on its loggers: with each the run is resumed exactly, and its curves continue."""

import csv
import json
import signal
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.dcvision.commands import run, small
from tests.faults.drill import mistake

from .commands import record
from .recorder import read

OFFLINE = ["--trainer.logger.offline=true"]
LOGGERS = {
    "default": [],
    "none": ["--trainer.logger=false"],
    "csv": ["--trainer.logger", "CSVLogger"],
    "csv elsewhere": ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"],
    "added": ["--trainer.logger+=CSVLogger"],
    "wandb": ["--trainer.logger=WandbLogger", *OFFLINE],
    "mlflow": ["--trainer.logger=MLFlowLogger"],
    "several": ["--trainer.logger=CSVLogger", "--trainer.logger+=WandbLogger", *OFFLINE],
}
SLOW = ("none", "csv elsewhere", "added", "mlflow", "several")
CURVES = {"default": ["tensorboard"], "csv": ["csv"], "added": ["tensorboard", "csv"], "several": ["csv"]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Run in a folder of its own; Weights & Biases offline, MLflow with the store of files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of ten steps."""
    root = tmp_path_factory.mktemp("uninterrupted")
    run("fit", *arguments(root), *record(root / "steps"))
    return {step: record["loss"] for step, record in read(root / "steps").items()}


def arguments(root: Path) -> list[str]:
    return [
        *small("", root / "runs"), "--data.train=digits", "--data.val=digits", "--data.image_size=8",
        "--data.num_classes=10", "--trainer.max_epochs=-1", "--trainer.max_steps=10", "--trainer.val_check_interval=3",
        "--trainer.limit_val_batches=2", "--checkpoint_every_n_steps=4",
    ]  # fmt: skip


def curve(folder: Path, kind: str) -> list[int]:
    """The steps of the training loss that a logger of files has written."""
    if kind == "csv":
        rows = csv.DictReader((folder / "metrics.csv").open())
        return [int(row["step"]) for row in rows if row["train/loss"]]
    return [event.step for event in EventAccumulator(str(folder)).Reload().Scalars("train/loss")]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in LOGGERS]
)
def test_run_is_resumed_exactly(tmp_path, capsys, uninterrupted, name):
    fit = ["fit", *arguments(tmp_path), *LOGGERS[name], "--resume=latest"]
    run(*fit, *record(tmp_path / "steps", signum=int(signal.SIGTERM), at=5))
    assert "--resume runs/t/version_0/checkpoints/last-step=6.ckpt" in capsys.readouterr().out
    run(*fit, *record(tmp_path / "steps"))
    assert {step: record["loss"] for step, record in read(tmp_path / "steps").items()} == uninterrupted

    version = tmp_path / "runs/t/version_0"
    assert [path.name for path in version.parent.iterdir()] == ["version_0"]
    kinds = [path.name.split("-")[0] for path in (version / "checkpoints").iterdir()]
    assert sorted(kinds) == ["best", "last"] and (version / "checkpoints/last-step=10.ckpt").is_file()
    files = {path.name for path in version.iterdir()}
    assert {"config.yaml", "config-resumed.yaml", "environment.json", "costs.json"} <= files
    assert {path.name for path in tmp_path.iterdir()} <= {"runs", "logs", "steps-rank0"}
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last.startswith("best val/top1 ") and " | checkpoint runs/t/version_0/checkpoints/best-" in last
    for kind in CURVES.get(name, []):
        assert curve(version, kind) == list(range(10))
    if name == "csv elsewhere":
        assert curve(tmp_path / "logs/t/version_0", "csv") == list(range(10))


def test_resumed_run_keeps_the_ids_of_its_loggers(tmp_path):
    both = ["--trainer.logger=WandbLogger", *OFFLINE, "--trainer.logger+=MLFlowLogger"]
    fit = ["fit", *arguments(tmp_path), *both, "--resume=latest", "--trainer.limit_val_batches=0"]
    ids = []
    for steps in (1, 2):
        run(*fit, f"--trainer.max_steps={steps}", "--model.warmup_steps=0")
        ids.append(json.loads((tmp_path / "runs/t/version_0/loggers.json").read_text()))
    assert ids[0] == ids[1] and ids[0].keys() == {"WandbLogger", "MLFlowLogger"}
    (experiment,) = {path.parent.parent for path in (tmp_path / "runs/mlruns").glob("*/*/meta.yaml")}
    assert [path.name for path in experiment.iterdir() if path.is_dir()] == [ids[0]["MLFlowLogger"]]
    assert (experiment / ids[0]["MLFlowLogger"] / "tags/mlflow.runName").read_text() == "version_0"


def test_users_checkpoints_lie_in_the_run(tmp_path):
    mine = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename=mine", "--trainer.logger=WandbLogger"]
    run("fit", *arguments(tmp_path), *mine, *OFFLINE, "--trainer.max_steps=1", "--model.warmup_steps=0")
    assert (tmp_path / "runs/t/version_0/checkpoints/mine.ckpt").is_file()


def test_missing_package_of_a_logger_is_named(tmp_path, capsys):
    error = mistake(capsys, run, "fit", *arguments(tmp_path), "--trainer.logger=CometLogger")
    assert "comet" in error
    assert not list(tmp_path.glob("runs/*"))
