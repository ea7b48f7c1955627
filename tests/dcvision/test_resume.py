"""Stopped or killed runs resume exactly: the samples and the bits of the loss equal an uninterrupted run."""

import os
import signal

import pytest
import torch

from dctrain.checkpointing.checkpoint import find_checkpoint, load_checkpoint, newest_checkpoint, run_folder
from dctrain.checkpointing.lightning_io import AtomicCheckpointIO
from dctrain.errors import UserError
from tests.dctrain.commands import record
from tests.dctrain.recorder import read

from .commands import run, small, spawn

STOPS = [(at, workers) for at in (0, 4, 9, 10, 17) for workers in (0, 2)]
FIRST_STOPS = [(4, 2), (9, 0)]  # inside an epoch, and at its last step


@pytest.mark.parametrize(
    ("at", "workers"),
    [*FIRST_STOPS, *(pytest.param(*stop, marks=pytest.mark.slow) for stop in STOPS if stop not in FIRST_STOPS)],
)
def test_stopped_and_resumed_run_equals_uninterrupted_run(shards, tmp_path, at, workers):
    common = [f"--data.num_workers={workers}"]
    run("fit", *small(shards, tmp_path / "whole"), *common, *record(tmp_path / "whole"))
    stopping = record(tmp_path / "parts", signum=int(signal.SIGTERM), at=at)
    run("fit", *small(shards, tmp_path / "parts"), *common, *stopping)
    if at:  # a run that is signaled before the first step stops at once
        assert set(read(tmp_path / "parts")) == set(range(at + 1))
    folder = tmp_path / "parts" / "t" / "version_0"
    run("fit", *small(shards, tmp_path / "parts"), *common, *record(tmp_path / "parts"), f"--resume={folder}")
    expected, got = read(tmp_path / "whole"), read(tmp_path / "parts")
    assert set(expected) == set(range(30))
    assert got == expected
    assert not (tmp_path / "parts" / "t" / "version_1").exists()
    final = [load_checkpoint(tmp_path / d / "t/version_0/checkpoints/last-step=30.ckpt") for d in ("whole", "parts")]
    for key, value in final[0]["state_dict"].items():
        assert torch.equal(value, final[1]["state_dict"][key]), key


@pytest.mark.slow
def test_run_killed_soon_after_resume_resumes_exactly(shards, tmp_path):
    """A resumed run keeps the checkpoint from which it was resumed until it has saved a newer one."""
    arguments = small(shards, tmp_path / "parts")
    folder = tmp_path / "parts/t/version_0"
    run("fit", *arguments, *record(tmp_path / "parts", signum=int(signal.SIGTERM), at=4))
    killing = record(tmp_path / "parts", signum=int(signal.SIGKILL), at=7)
    killed = spawn("fit", *arguments, *killing, f"--resume={folder}")
    assert killed.returncode == -signal.SIGKILL
    run("fit", *arguments, *record(tmp_path / "parts"), f"--resume={folder}")
    run("fit", *small(shards, tmp_path / "whole"), *record(tmp_path / "whole"))
    assert read(tmp_path / "parts") == read(tmp_path / "whole")
    assert [path.name for path in (folder / "checkpoints").glob("last*")] == ["last-step=30.ckpt"]


def test_resume_with_different_data_is_rejected(shards, tmp_path, capsys):
    run("fit", *small(shards, tmp_path), *record(tmp_path / "a", signum=int(signal.SIGTERM), at=4))
    resume = f"--resume={tmp_path}/t/version_0"
    for change, message in (
        ("--data.seed=1", "seed=0"),
        ("--data.train=shards:" + shards.replace("{0..4}", "{0..2}"), "num_samples=40"),
    ):
        with pytest.raises(SystemExit):
            run("fit", *small(shards, tmp_path), resume, change)
        assert f"the checkpoint was trained with {message}" in capsys.readouterr().err


@pytest.mark.slow
def test_run_stopped_during_gradient_accumulation_resumes_exactly(shards, tmp_path):
    common = ["--trainer.accumulate_grad_batches=4"]
    run("fit", *small(shards, tmp_path / "whole"), *common, *record(tmp_path / "whole"))
    stopping = record(tmp_path / "parts", signum=int(signal.SIGTERM), at=5)
    run("fit", *small(shards, tmp_path / "parts"), *common, *stopping)
    assert set(read(tmp_path / "parts")) == set(range(8))
    resume = f"--resume={tmp_path}/parts/t/version_0"
    run("fit", *small(shards, tmp_path / "parts"), *common, *record(tmp_path / "parts"), resume)
    assert read(tmp_path / "parts") == read(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("pattern", ["best-epoch=0*", "last*"])
def test_resume_from_checkpoint_at_end_of_epoch_is_exact(shards, tmp_path, pattern):
    """The best checkpoint is saved after validation, the last at the end of a run that ends after one epoch."""
    once = ["--trainer.max_steps=30", "--trainer.max_epochs=-1"]
    run("fit", *small(shards, tmp_path / "whole"), *once, *record(tmp_path / "whole"))
    ending = [*record(tmp_path / "parts"), "--trainer.callbacks+=tests.dctrain.recorder.EndAfterEpoch"]
    run("fit", *small(shards, tmp_path / "parts"), *once, *ending)
    assert len(read(tmp_path / "parts")) == 10
    checkpoint = next((tmp_path / "parts/t/version_0/checkpoints").glob(pattern))
    resume = f"--resume={checkpoint}"
    run("fit", *small(shards, tmp_path / "parts"), *once, *record(tmp_path / "parts"), resume)
    assert read(tmp_path / "parts") == read(tmp_path / "whole")


@pytest.mark.long  # the slow tests of dclm cover this case
def test_killed_run_resumes_exactly_from_periodic_checkpoint(shards, tmp_path):
    arguments = [*small(shards, tmp_path / "parts"), "--checkpoint_every_n_steps=4"]
    killed = spawn("fit", *arguments, *record(tmp_path / "parts", signum=int(signal.SIGKILL), at=14))
    assert killed.returncode == -signal.SIGKILL
    checkpoint = newest_checkpoint(tmp_path / "parts")
    assert checkpoint.name == "last-step=12.ckpt"
    run("fit", *arguments, *record(tmp_path / "parts"), f"--resume={checkpoint}")
    run("fit", *small(shards, tmp_path / "whole"), *record(tmp_path / "whole"))
    assert read(tmp_path / "parts") == read(tmp_path / "whole")


@pytest.mark.parametrize(
    "signalled_rank", [pytest.param(0, marks=pytest.mark.long), pytest.param(1, marks=pytest.mark.long)]
)
def test_two_processes_stop_together_and_resume_exactly(shards, tmp_path, signalled_rank):
    two = ["--trainer.strategy=ddp", "--trainer.devices=2", "--data.batch_size=2", "--data.num_workers=1"]
    stopping = record(tmp_path / "parts", signum=int(signal.SIGTERM), at=12, rank=signalled_rank)
    stopped = spawn("fit", *small(shards, tmp_path / "parts"), *two, *stopping)
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped by SIGTERM; continue with --resume" in stopped.stdout
    folder = tmp_path / "parts" / "t" / "version_0"
    assert newest_checkpoint(folder).name == "last-step=20.ckpt"  # the ranks agree to stop at every tenth step
    resumed = spawn("fit", *small(shards, tmp_path / "parts"), *two, *record(tmp_path / "parts"), f"--resume={folder}")
    assert resumed.returncode == 0, resumed.stderr
    whole = spawn("fit", *small(shards, tmp_path / "whole"), *two, *record(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    for rank in (0, 1):
        assert read(tmp_path / "parts", rank) == read(tmp_path / "whole", rank)


@pytest.mark.long
def test_resume_with_one_process_reads_samples_not_read_by_two(shards, tmp_path):
    two = ["--trainer.strategy=ddp", "--trainer.devices=2", "--data.batch_size=1"]  # twenty steps per epoch
    stopped = spawn("fit", *small(shards, tmp_path), *two, *record(tmp_path / "a", signum=int(signal.SIGTERM), at=25))
    assert stopped.returncode == 0, stopped.stderr
    seen = [n for rank in (0, 1) for b, r in read(tmp_path / "a", rank).items() if b >= 20 for n in r["samples"]]
    assert len(set(seen)) == 20  # the ranks agreed to stop after step 30, in the middle of the second epoch
    with pytest.warns(UserWarning, match="global batch changed from 2 to 4"):
        run("fit", *small(shards, tmp_path), *record(tmp_path / "b"), f"--resume={tmp_path}/t/version_0")
    batches = [record["samples"] for _, record in sorted(read(tmp_path / "b").items())]
    rest = [name for names in batches[:5] for name in names]
    assert len(set(seen + rest)) == 40
    assert len(batches) == 5 + 10


@pytest.mark.parametrize("batch_size", [5, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 8))])
def test_resume_with_different_global_batch_reads_rest_of_epoch_once(shards, tmp_path, batch_size):
    run("fit", *small(shards, tmp_path), *record(tmp_path / "a", signum=int(signal.SIGTERM), at=13))
    first_epoch_two = [name for batch in range(10, 14) for name in read(tmp_path / "a")[batch]["samples"]]
    resume = [f"--data.batch_size={batch_size}", f"--resume={tmp_path}/t/version_0"]
    with pytest.warns(UserWarning, match=f"global batch changed from 4 to {batch_size}"):
        run("fit", *small(shards, tmp_path), *resume, *record(tmp_path / "b"))
    batches = [record["samples"] for _, record in sorted(read(tmp_path / "b").items())]
    rest = (40 - 16) // batch_size
    later = [name for names in batches[:rest] for name in names]
    assert len(set(first_epoch_two + later)) == 16 + rest * batch_size
    third = [name for names in batches[rest:] for name in names]
    assert len(batches) - rest == 40 // batch_size and len(set(third)) == len(third)


@pytest.mark.parametrize("batch_size", [5, pytest.param(2, marks=pytest.mark.slow)])
def test_resume_with_different_global_batch_at_end_of_epoch(shards, tmp_path, batch_size):
    """The checkpoint is saved after the last step of the first epoch and does not count this step as completed."""
    every = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.every_n_train_steps=10"]
    keep = ["--trainer.callbacks.save_top_k=-1", "--trainer.callbacks.filename={step}"]
    run("fit", *small(shards, tmp_path), *every, *keep)
    (checkpoint,) = tmp_path.rglob("step=10.ckpt")
    resume = [f"--data.batch_size={batch_size}", f"--resume={checkpoint}"]
    run("fit", *small(shards, tmp_path), *resume, *record(tmp_path / "b"))
    batches = [record["samples"] for _, record in sorted(read(tmp_path / "b").items())]
    assert len(batches) == 2 * (40 // batch_size)
    for epoch in (batches[: 40 // batch_size], batches[40 // batch_size :]):
        assert len({name for names in epoch for name in names}) == 40


def test_failed_save_preserves_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "a.ckpt"
    writer = AtomicCheckpointIO()
    writer.save_checkpoint({"x": torch.ones(3)}, path)
    real_save = torch.save

    def fail_half_way(content, file):
        real_save(content, file)
        file.truncate(10)
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", fail_half_way)
    with pytest.raises(OSError, match="disk full"):
        writer.save_checkpoint({"x": torch.zeros(3)}, path)
    assert torch.equal(load_checkpoint(path)["x"], torch.ones(3))


def test_find_checkpoint_returns_newest_and_rejects_invalid_paths(tmp_path):
    folder = tmp_path / "version_0" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("last-step=90.ckpt", "last-step=100.ckpt", "best-epoch=3-top1=0.9.ckpt"):
        (folder / name).touch()
        os.utime(folder / name, (1000, 1000))
    assert newest_checkpoint(tmp_path).name == "last-step=100.ckpt"
    os.utime(folder / "best-epoch=3-top1=0.9.ckpt", (2000, 2000))
    assert newest_checkpoint(tmp_path).name == "best-epoch=3-top1=0.9.ckpt"
    assert run_folder(folder / "last-step=90.ckpt") == tmp_path / "version_0"
    assert run_folder(tmp_path / "elsewhere.ckpt") is None
    assert find_checkpoint(str(folder)) == find_checkpoint(str(tmp_path / "version_0"))
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "nothing", tmp_path / "empty"):
        with pytest.raises(UserError, match=f"{wrong.name}.*expected a .ckpt file"):
            find_checkpoint(str(wrong))
    with pytest.raises(UserError, match=f"{tmp_path} is not the folder of a run.*the run {tmp_path / 'version_0'}"):
        find_checkpoint(str(tmp_path))
    with pytest.raises(UserError, match="''"):
        find_checkpoint("")
    with pytest.raises(UserError, match="last-step=90.ckpt is not a readable checkpoint"):
        load_checkpoint(folder / "last-step=90.ckpt")
