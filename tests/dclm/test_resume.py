"""Stopped or killed runs of language models resume with the same results as uninterrupted runs."""

import signal
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from tests.dctrain.commands import record
from tests.dctrain.recorder import read

from .commands import run, small, spawn

WORKERS = ["--data.num_workers=1", "--data.separate_documents=true"]
STOPS = [(4, WORKERS)]
MORE_STOPS = [(17, []), (17, WORKERS), (9, []), (9, WORKERS), (4, [])]


@pytest.mark.parametrize(
    ("at", "extra"), [*STOPS, *(pytest.param(*stop, marks=pytest.mark.slow) for stop in MORE_STOPS)], ids=str
)
def test_stopped_and_resumed_run_equals_uninterrupted_run(corpus, tmp_path, at, extra):
    run("fit", *small(corpus, tmp_path / "whole"), *extra, *record(tmp_path / "whole"))
    stopping = record(tmp_path / "parts", signum=int(signal.SIGTERM), at=at)
    run("fit", *small(corpus, tmp_path / "parts"), *extra, *stopping)
    assert set(read(tmp_path / "parts")) == set(range(at + 1))
    resume = f"--resume={tmp_path}/parts/t/version_0"
    run("fit", *small(corpus, tmp_path / "parts"), *extra, *record(tmp_path / "parts"), resume)
    expected = read(tmp_path / "whole")
    assert set(expected) == set(range(30))
    assert read(tmp_path / "parts") == expected
    for epoch in range(3):
        samples = [i for batch in range(10 * epoch, 10 * epoch + 10) for i in expected[batch]["samples"]]
        assert len(samples) == len(set(samples)) == 40


def test_checkpoint_with_different_sequence_order_causes_warning(corpus, tmp_path):
    run("fit", *small(corpus, tmp_path), *record(tmp_path / "a", at=4))
    path = newest_checkpoint(tmp_path)
    checkpoint = load_checkpoint(path)
    del checkpoint["TokenDataModule"]["order"]
    torch.save(checkpoint, path)
    with pytest.warns(UserWarning, match="different order of sequences: in this epoch some are seen twice"):
        run("fit", *small(corpus, tmp_path), "--trainer.max_epochs=1", f"--resume={path}")


@pytest.mark.slow
def test_killed_run_resumes_from_last_checkpoint(corpus, tmp_path):
    by_steps = ["--trainer.max_steps=25", "--trainer.max_epochs=-1"]
    by_steps += ["--trainer.val_check_interval=7", "--trainer.check_val_every_n_epoch=null"]
    arguments = [*small(corpus, tmp_path / "parts"), *by_steps, "--checkpoint_every_n_steps=4"]
    killed = spawn("fit", *arguments, *record(tmp_path / "parts", signum=int(signal.SIGKILL), at=14))
    assert killed.returncode == -signal.SIGKILL
    last = tmp_path / "parts/t/version_0/checkpoints/last-step=12.ckpt"
    run("fit", *arguments, *record(tmp_path / "parts"), f"--resume={last}")
    run("fit", *small(corpus, tmp_path / "whole"), *by_steps, *record(tmp_path / "whole"))
    assert read(tmp_path / "parts") == read(tmp_path / "whole")
    ends = [load_checkpoint(tmp_path / d / "t/version_0/checkpoints/last-step=25.ckpt") for d in ("parts", "whole")]
    assert ends[0]["TokenDataModule"] == ends[1]["TokenDataModule"]
    best = [
        sorted(p.name for p in (tmp_path / d / "t/version_0/checkpoints").glob("best*")) for d in ("parts", "whole")
    ]
    assert best[0] == best[1] and len(best[0]) == 1


@pytest.mark.parametrize(
    ("by", "at"),  # killed before and after the first periodic checkpoint
    [
        pytest.param("steps", 2, marks=pytest.mark.slow),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("steps", 6), ("epochs", 2), ("epochs", 6))),
    ],
)
def test_logged_curves_of_resumed_run_equal_uninterrupted_run(corpus, tmp_path, at, by):
    common = [*small(corpus, tmp_path), "--checkpoint_every_n_steps=4", "--trainer.num_sanity_val_steps=0"]
    if by == "steps":
        common += ["--trainer.max_steps=12", "--trainer.max_epochs=-1"]
        common += ["--trainer.val_check_interval=3", "--trainer.check_val_every_n_epoch=null"]
    run("fit", *common, "--name=whole")
    killed = spawn("fit", *common, "--name=parts", *record(tmp_path / "parts", signum=int(signal.SIGKILL), at=at))
    assert killed.returncode == -signal.SIGKILL
    time.sleep(1)  # TensorBoard orders event files by the seconds in their names
    run("fit", *common, "--name=parts", f"--resume={tmp_path}/parts/version_0")
    whole, parts = ({tag: curve(tmp_path / name / "version_0", tag) for tag in CURVES} for name in ("whole", "parts"))
    assert parts == whole


CURVES = ("train/loss", "train/lr", "val/loss")


def curve(folder, tag: str) -> dict[int, float]:
    """Return the logged values of a tag, keyed by step."""
    events = EventAccumulator(str(folder)).Reload().Scalars(tag)
    found = {event.step: event.value for event in events}
    assert tag.startswith("val/") or len(found) == len(events)  # a validation may be repeated
    return found


@pytest.mark.long
def test_two_processes_stop_together_and_one_process_resumes(corpus, tmp_path):
    two = ["--trainer.strategy=ddp", "--trainer.devices=2", "--data.batch_size=1"]  # twenty steps per epoch
    stopped = spawn("fit", *small(corpus, tmp_path), *two, *record(tmp_path / "a", at=25, rank=1))
    assert stopped.returncode == 0, stopped.stderr
    assert "stopped by SIGTERM; continue with --resume" in stopped.stdout
    seen = [i for rank in (0, 1) for b, r in read(tmp_path / "a", rank).items() if b >= 20 for i in r["samples"]]
    assert len(set(seen)) == 20
    with pytest.warns(UserWarning, match="global batch changed from 2 to 4 sequences"):
        run("fit", *small(corpus, tmp_path), *record(tmp_path / "b"), f"--resume={tmp_path}/t/version_0")
    batches = [record["samples"] for _, record in sorted(read(tmp_path / "b").items())]
    rest = [i for samples in batches[:5] for i in samples]
    assert len(set(seen + rest)) == 40
    assert len(batches) == 5 + 10
