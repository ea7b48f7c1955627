"""SLURM jobs: the signal stops a run, `--resume=latest` resumes it, and Lightning's own checkpoints are rejected."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from tests.dctrain.commands import ROOT, record
from tests.dctrain.recorder import read

from .commands import run, small

JOB = {"NTASKS": 1, "JOB_ID": 7, "JOB_NAME": "train", "PROCID": 0, "LOCALID": 0, "NODEID": 0, "NTASKS_PER_NODE": 1}


@pytest.fixture
def job(monkeypatch):
    """Set the environment variables of srun."""
    for name, value in JOB.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))


@pytest.mark.usefixtures("job")
def test_requeued_job_resumes_where_it_stopped(corpus, tmp_path):
    run("fit", *small(corpus, tmp_path / "whole"), *record(tmp_path / "whole"))
    parts = ["fit", *small(corpus, tmp_path / "parts"), "--resume=latest"]
    run(*parts, *record(tmp_path / "parts", signum=int(signal.SIGUSR1), at=12))
    assert set(read(tmp_path / "parts")) == set(range(13))
    assert (tmp_path / "parts/t/version_0/config.yaml").is_file()
    run(*parts, *record(tmp_path / "parts"))
    assert read(tmp_path / "parts") == read(tmp_path / "whole")
    assert [path.name for path in (tmp_path / "parts").iterdir()] == ["t"]
    assert [path.name for path in (tmp_path / "parts/t").iterdir()] == ["version_0"]


@pytest.mark.long
@pytest.mark.usefixtures("job")
def test_batch_script_requeues_job_until_it_is_finished(corpus, tmp_path):
    """Stub programs replace srun and scontrol."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", 'exec "$@"'), ("scontrol", f'echo "$@" > {tmp_path}/said')):
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "configs/launch/slurm.sh", "dclm", "fit", *small(corpus, tmp_path), "--trainer.max_epochs=60"]
    job = subprocess.Popen(command, env=os.environ | {"PATH": path}, cwd=ROOT, start_new_session=True)
    while newest_checkpoint(tmp_path) is None:
        time.sleep(0.2)
    job.send_signal(signal.SIGUSR1)
    job.wait(timeout=60)
    assert (tmp_path / "said").read_text() == "requeue 7\n"
    step = load_checkpoint(newest_checkpoint(tmp_path / "train-7"))["global_step"]
    (tmp_path / "said").unlink()
    command[-1] = f"--trainer.max_epochs={step // 10 + 2}"
    subprocess.run(command, env=os.environ | {"PATH": path}, cwd=ROOT, check=True, timeout=60)
    assert load_checkpoint(newest_checkpoint(tmp_path / "train-7"))["global_step"] == (step // 10 + 2) * 10
    assert not (tmp_path / "said").exists()


@pytest.mark.usefixtures("job")
def test_lightning_hpc_checkpoint_is_rejected_unless_resumed_explicitly(corpus, tmp_path, capsys):
    run("fit", *small(corpus, tmp_path), "--trainer.max_epochs=1")
    (tmp_path / "t/version_0/checkpoints/last-step=10.ckpt").rename(tmp_path / "hpc_ckpt_1.ckpt")
    with pytest.raises(SystemExit) as exit_info:
        run("fit", *small(corpus, tmp_path))
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/hpc_ckpt_1.ckpt would be loaded by Lightning; continue from it with --resume=" in error
    run("fit", *small(corpus, tmp_path), *record(tmp_path / "on"), f"--resume={tmp_path}/hpc_ckpt_1.ckpt")
    assert set(read(tmp_path / "on")) == set(range(10, 30))
