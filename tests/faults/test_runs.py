"""Run folders and their locks, settings changed on resume, and damaged checkpoints."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dctrain.checkpointing.checkpoint import find_checkpoint, load_checkpoint, newest_checkpoint
from dctrain.errors import UserError
from dctrain.run_dir import LOCK, new_run
from tests.dctrain.commands import ROOT, record
from tests.dctrain.recorder import read
from tests.dcvision.commands import run, small, spawn

from .fault_injection import mistake
from .test_images import folders


def stop_at(file: Path, at: int) -> list[str]:
    return record(file, signum=int(signal.SIGTERM), at=at)


@pytest.mark.long
def test_concurrent_runs_get_separate_folders(shards, tmp_path):
    command = [sys.executable, "-m", "dcvision", "fit", *small(shards, tmp_path), "--trainer.max_epochs=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    started = [subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE) for _ in range(3)]
    errors = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], errors
    folders = sorted((tmp_path / "t").iterdir())
    assert [folder.name for folder in folders] == ["version_0", "version_1", "version_2"]
    for folder in folders:
        assert (folder / "checkpoints/last-step=10.ckpt").is_file() and len(list(folder.glob("events*"))) == 1


@pytest.mark.slow
def test_run_is_locked_by_one_process_until_it_ends_or_dies(shards, tmp_path, capsys):
    arguments = small(shards, tmp_path)
    run("fit", *arguments, *stop_at(tmp_path / "a", 3))
    folder = tmp_path / "t/version_0"
    assert (folder / LOCK).exists()  # the lock file remains, as after a kill
    holding = (
        "import sys, time; from pathlib import Path; from dctrain.run_dir import locked_run\n"
        "with locked_run(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holding, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "held\n"
        assert f"the run {folder} is being trained by another process" in mistake(
            capsys, run, "fit", *arguments, f"--resume={folder}"
        )
        other.kill()
    run("fit", *arguments, f"--resume={folder}", *record(tmp_path / "a"))
    assert set(read(tmp_path / "a")) == set(range(30))


@pytest.mark.parametrize(
    "wrong",
    ["--model.lr=-1", "--data.num_classes=3", "--model.model=nothing", "--data.train=folder:nowhere"],
)
def test_rejected_run_leaves_no_folder(shards, tmp_path, capsys, wrong):
    mistake(capsys, run, "fit", *small(shards, tmp_path / "root"), wrong)
    assert not list((tmp_path / "root").rglob("*"))


def test_failed_new_run_is_removed_and_older_runs_are_preserved(tmp_path):
    (tmp_path / "t/version_7").mkdir(parents=True)
    with pytest.raises(UserError), new_run(tmp_path / "t") as folder:
        assert folder.name == "version_8"
        raise UserError("refused")
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["version_7"]


def test_changed_settings_apply_and_are_recorded_on_resume(shards, tmp_path, capsys):
    arguments = [*small(shards, tmp_path), "--model.mixup_alpha=0", "--model.warmup_steps=0"]
    run("fit", *arguments, *stop_at(tmp_path / "a", 9))
    folder = tmp_path / "t/version_0"
    changed = ["--model.lr=1", "--model.weight_decay=0.25", "--model.betas=[0.8,0.9]", "--model.label_smoothing=0.1"]
    run("fit", *arguments, *changed, f"--resume={folder}", *record(tmp_path / "a"))
    said = "resumed with changed settings: lr 0.003 -> 1.0, weight_decay 0.1 -> 0.25, betas [0.9, 0.999] -> [0.8, 0.9]"
    out = capsys.readouterr().out
    assert said in out, out
    steps = read(tmp_path / "a")
    assert steps[9]["lr"] < 0.003 and 0.5 < steps[11]["lr"] < 1
    group, free = load_checkpoint(newest_checkpoint(folder))["optimizer_states"][0]["param_groups"]
    assert group["weight_decay"] == 0.25 and free["weight_decay"] == 0 and group["betas"] == (0.8, 0.9)
    assert yaml.safe_load((folder / "config-resumed.yaml").read_text())["model"]["lr"] == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--model.decay_all=true", "decay_all=True cannot change when a run is resumed"),
        ("--data.seed=5", "was trained with seed=0, this run has 5"),
        ("--model.model_kwargs={depth: 3}", "the checkpoint has a different architecture"),
        ("--data.train=digits", "was trained with num_samples=40, this run has 1437"),
    ],
)
def test_resume_rejects_settings_that_cannot_change(shards, tmp_path, capsys, wrong, message):
    run("fit", *small(shards, tmp_path), *stop_at(tmp_path / "a", 3))
    before = {path: path.read_bytes() for path in (tmp_path / "t").rglob("*.ckpt")}
    error = mistake(capsys, run, "fit", *small(shards, tmp_path), wrong, f"--resume={tmp_path}/t/version_0")
    assert message in error
    assert {path: path.read_bytes() for path in (tmp_path / "t").rglob("*.ckpt")} == before


@pytest.mark.slow
def test_resume_from_best_leaves_one_last_and_one_best_checkpoint(shards, tmp_path):
    arguments = small(shards, tmp_path)
    run("fit", *arguments, "--trainer.max_epochs=2")
    (best,) = (tmp_path / "t/version_0/checkpoints").glob("best-*")
    late = best.with_name("best-epoch=1-top1=0.0001.ckpt")
    late.write_bytes(best.read_bytes())
    run("fit", *arguments, f"--resume={best}", "--trainer.max_epochs=4")
    names = [path.name.split("=")[0] for path in best.parent.iterdir()]
    assert sorted(names) == ["best-epoch", "last-step"]


DAMAGES = {
    "a flipped bit": "is damaged: ",
    "cut short": "is not a readable checkpoint",
    "no zip": "is not a readable checkpoint",
    "a list": "is not a checkpoint: it holds a list",
    "no optimizer": "cannot be resumed: it has no optimizer_states",
    "no weights": "cannot be resumed: it has no",
}


def damage(path: Path, how: str) -> None:
    content = torch.load(path, weights_only=True)
    if how == "a flipped bit":
        with zipfile.ZipFile(path) as file:
            largest = max(file.infolist(), key=lambda info: info.file_size)
        data = bytearray(path.read_bytes())
        data[largest.header_offset + 200] ^= 16
        path.write_bytes(data)
    elif how == "cut short":
        path.write_bytes(path.read_bytes()[:-100])
    elif how == "no zip":
        path.write_bytes(b"text" * 100)
    elif how == "a list":
        torch.save([1, 2], path)
    else:
        del content["optimizer_states" if how == "no optimizer" else "state_dict"]
        torch.save(content, path)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Checkpoint of a short run on the digits."""
    root = tmp_path_factory.mktemp("stopped")
    run("fit", *small("unused", root), "--data.train=digits", "--data.val=digits", "--trainer.max_steps=3")
    return newest_checkpoint(root)


@pytest.mark.parametrize("how", DAMAGES)
def test_damaged_checkpoint_is_rejected(stopped, tmp_path, capsys, how):
    path = tmp_path / "damaged.ckpt"
    path.write_bytes(stopped.read_bytes())
    damage(path, how)
    arguments = [*small("unused", tmp_path), "--data.train=digits", "--data.val=digits"]
    assert DAMAGES[how] in mistake(capsys, run, "fit", *arguments, f"--resume={path}")
    if how != "no optimizer":
        mistake(capsys, run, "export", f"--checkpoint={path}", f"--out={tmp_path}/out")
        assert not (tmp_path / "out").exists()


def test_export_with_missing_tensor_is_rejected(stopped, tmp_path, capsys):
    content = torch.load(stopped, weights_only=True)
    del content["state_dict"]["model.head.weight"]
    torch.save(content, tmp_path / "a.ckpt")
    error = mistake(capsys, run, "export", f"--checkpoint={tmp_path}/a.ckpt", f"--out={tmp_path}/out")
    assert "do not match its model" in error and "head.weight" in error


TWO_SHARDS = ["--trainer.strategy=fsdp2", "--trainer.devices=2", "--data.batch_size=2"]


@pytest.mark.parametrize(
    ("seed", "strategy"),
    [
        pytest.param(
            seed,
            strategy,
            marks=pytest.mark.slow if seed == 0 and not strategy else pytest.mark.long,
            id=f"{seed}-{'sharded' if strategy else 'whole'}",
        )
        for seed in range(8)
        for strategy in ([], TWO_SHARDS)
    ],
)
def test_killed_run_resumes_and_matches_uninterrupted_run(shards, tmp_path, seed, strategy):
    """After a kill at any time, all remaining checkpoints load, and the resumed run ends with the same weights."""
    arguments = [*small(shards, tmp_path), *strategy]
    command = [sys.executable, "-m", "dcvision", "fit", *arguments, "--checkpoint_every_n_steps=1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **silent)
    folder = tmp_path / "t/version_0"
    deadline = time.monotonic() + 120
    while not list(folder.glob("checkpoints/last-*.ckpt")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.4 * seed)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in folder.rglob("*.ckpt"):
        load_checkpoint(path, with_optimizer=True)
    resumed = spawn("fit", *arguments, f"--resume={folder}")
    assert resumed.returncode == 0, resumed.stderr
    assert {path.name.split("-")[0] for path in folder.glob("checkpoints/*")} == {"best", "last"}
    whole = spawn("fit", *small(shards, tmp_path / "whole"), *strategy)
    assert whole.returncode == 0, whole.stderr
    ends = [
        load_checkpoint(root / "t/version_0/checkpoints/last-step=30.ckpt") for root in (tmp_path, tmp_path / "whole")
    ]
    assert all(torch.equal(value, ends[1]["state_dict"][name]) for name, value in ends[0]["state_dict"].items())


def test_resumed_run_keeps_environments_and_events_in_one_folder(shards, tmp_path):
    run("fit", *small(shards, tmp_path), *stop_at(tmp_path / "a", 3))
    run("fit", *small(shards, tmp_path), f"--resume={tmp_path}/t/version_0")
    folder = tmp_path / "t/version_0"
    assert len(json.loads((folder / "environment.json").read_text())) == 2
    assert len(EventAccumulator(str(folder)).Reload().Scalars("train/loss")) == 30


def test_partial_checkpoints_of_killed_run_are_removed_on_resume(shards, tmp_path):
    run("fit", *small(shards, tmp_path), *stop_at(tmp_path / "a", 3))
    (last,) = tmp_path.glob("t/version_0/checkpoints/last-*.ckpt")
    folder = last.parent
    left = ["last-step=1.ckpt.0.partial", "before-last-step=1.ckpt", "best-epoch=0-top1=0.1000.ckpt.0.partial"]
    for name in left:
        (folder / name).mkdir()
    run("fit", *small(shards, tmp_path), f"--resume={last}")
    assert {path.name.split("-")[0] for path in folder.iterdir()} == {"best", "last"}
    assert not any((folder / name).exists() for name in left)


@pytest.mark.slow
def test_checkpoints_of_other_runs_and_of_users_are_preserved(shards, tmp_path):
    """A run without a logger has a separate folder. Copies that a user adds to a run are kept."""
    run("fit", *small(shards, tmp_path), "--trainer.max_epochs=1")
    before = {path.name for path in (tmp_path / "t/version_0/checkpoints").iterdir()}
    run("fit", *small(shards, tmp_path), "--trainer.logger=false", "--trainer.max_steps=3")
    assert (tmp_path / "t/version_1/checkpoints/last-step=3.ckpt").is_file()
    assert {path.name for path in (tmp_path / "t/version_0/checkpoints").iterdir()} == before
    folder = tmp_path / "t/version_0/checkpoints"
    (best,) = folder.glob("best-*")
    kept = [
        best.with_name("best-keep.ckpt"),
        best.with_name("best-epoch=0.ckpt"),
        best.with_name("last-step=mine.ckpt"),
    ]
    for path in kept:
        path.write_bytes(best.read_bytes())
    run("fit", *small(shards, tmp_path), f"--resume={folder / 'last-step=10.ckpt'}")
    assert all(path.is_file() for path in kept) and (folder / "last-step=30.ckpt").is_file()
    assert not (folder / "last-step=10.ckpt").exists()


def test_predict_works_without_known_labels_and_with_missing_class_names(shards, tmp_path):
    train = folders(tmp_path / "train", ["ant", "bee", "cat"])
    arguments = [*small("unused", tmp_path), f"--data.train=folder:{train}", f"--data.val=folder:{train}"]
    run("fit", *arguments, "--trainer.max_steps=3")  # 10 classes, 3 of them with names
    path = find_checkpoint(str(tmp_path / "t/version_0"))
    content = torch.load(path, weights_only=True)
    content["state_dict"]["model.head.bias"][9] = 100
    torch.save(content, tmp_path / "nine.ckpt")
    photos = folders(tmp_path / "photos", ["x"])
    run("predict", *arguments, f"--data.val=folder:{photos}", f"--checkpoint={tmp_path}/nine.ckpt")
    with open(tmp_path / "t/version_1/predictions.csv") as file:
        assert [(row["class"], row["class_name"]) for row in csv.DictReader(file)] == [("9", "")] * 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--trainer.val_check_interval=1000"], "val_check_interval"),
        (["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=foo"], "foo"),
    ],
)
def test_lightning_errors_about_arguments_are_one_line(shards, tmp_path, capsys, wrong, message):
    assert message in mistake(capsys, run, "fit", *small(shards, tmp_path), *wrong)


@pytest.mark.long
def test_fsdp2_run_resumes_and_finishes(shards, tmp_path):
    arguments = ["fit", *small(shards, tmp_path), *TWO_SHARDS, "--checkpoint_every_n_steps=5"]
    stopped = spawn(*arguments, "--trainer.max_steps=10")
    assert stopped.returncode == 0, stopped.stderr
    resumed = spawn(*arguments, f"--resume={tmp_path}/t/version_0")
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "t/version_0/checkpoints/last-step=30.ckpt").is_dir()
