"""The run folder does not depend on the loggers: with each logger, the run resumes exactly and its curves continue."""

import csv
import json
import signal
from pathlib import Path

import pytest
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dctrain.loggers import finish, record_ids, truncate_curves
from tests.dcvision.commands import run, small
from tests.faults.fault_injection import mistake

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
    """Run each test in a temporary folder, with Weights & Biases offline."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses of ten uninterrupted steps by batch."""
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
    """Return the steps of the training loss in the files of a logger."""
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
        assert curve(version, kind) == list(range(1, 11))
    if name == "csv elsewhere":
        assert curve(tmp_path / "logs/t/version_0", "csv") == list(range(1, 11))


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


def test_user_checkpoints_are_saved_in_run_folder(tmp_path):
    mine = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename=mine", "--trainer.logger=WandbLogger"]
    run("fit", *arguments(tmp_path), *mine, *OFFLINE, "--trainer.max_steps=1", "--model.warmup_steps=0")
    assert (tmp_path / "runs/t/version_0/checkpoints/mine.ckpt").is_file()


def test_missing_logger_package_is_named_in_error(tmp_path, capsys):
    error = mistake(capsys, run, "fit", *arguments(tmp_path), "--trainer.logger=CometLogger")
    assert "comet" in error
    assert not list(tmp_path.glob("runs/*"))


def test_save_dir_argument_sets_folder_of_file_logger(tmp_path):
    mine = ["--trainer.logger=CSVLogger", "--trainer.logger.init_args.save_dir=mine"]
    run("fit", *arguments(tmp_path), *mine, "--trainer.max_steps=1", "--model.warmup_steps=0")
    assert (tmp_path / "mine/t/version_0/metrics.csv").is_file()
    assert (tmp_path / "runs/t/version_0/config.yaml").is_file()


def test_truncated_curves_keep_complete_rows_up_to_resumed_step(tmp_path):
    """A run may be killed after rows that are newer than the checkpoint, and in the middle of a row."""
    log = tmp_path / "version_0/metrics.csv"
    log.parent.mkdir()
    log.write_bytes(b"loss,step\r\n1.0,1\r\n2.0,2\r\n3.0,3\r\n4.0,")
    logger = CSVLogger(tmp_path, name="", version=0)
    truncate_curves([logger], step=2, is_due=False)
    logger.log_metrics({"loss": 5.0}, step=3)
    logger.save()
    with log.open(newline="") as file:
        assert list(csv.reader(file)) == [["loss", "step"], ["1.0", "1"], ["2.0", "2"], ["5.0", "3"]]


def test_finish_starts_no_run_for_unused_logger(tmp_path):
    finish([WandbLogger(save_dir=tmp_path, offline=True)])
    assert not list(tmp_path.rglob("*run*"))


def test_ids_of_other_loggers_and_of_subclasses_are_kept(tmp_path):
    class Mine(WandbLogger):
        version = "abc"

    (tmp_path / "loggers.json").write_text('{"MLFlowLogger": "1"}')
    record_ids([Mine(save_dir=tmp_path, offline=True)], tmp_path)
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"MLFlowLogger": "1", "WandbLogger": "abc"}


def test_repeated_validation_is_logged_once(tmp_path):
    log = tmp_path / "version_0/metrics.csv"
    log.parent.mkdir()
    rows = [{"step": "1", "train/loss": "1.0"}, {"step": "1", "val/loss": "2.0"}, {"step": "2", "train/loss": "1.0"}]
    rows.append({"step": "2", "val/loss": "2.0"})
    with log.open("w", newline="") as file:
        table = csv.DictWriter(file, ["step", "train/loss", "val/loss"])
        table.writeheader()
        table.writerows(rows)
    for is_due, kept in ((False, 4), (True, 3)):
        truncate_curves([CSVLogger(tmp_path, name="", version=0)], step=2, is_due=is_due)
        with log.open(newline="") as file:
            assert len(list(csv.DictReader(file))) == kept
