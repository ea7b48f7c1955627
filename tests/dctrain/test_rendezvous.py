"""Rendezvous: processes that wait for other ranks print a notice and exit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dctrain.distributed.rendezvous import watch

QUICK = {"interval": 0.01, "notice_seconds": 0.05, "limit_seconds": 0.2}


def watched(launcher: int | None, is_ready, **options) -> tuple[list[str], list[str]]:
    """Return the notices of `watch` and the messages with which it ends the process."""
    said, ended = [], []
    watch("rank 1 of 2", launcher, is_ready, said.append, ended.append, **QUICK | options)
    return said, ended


def test_process_that_starts_in_time_prints_no_notice():
    looks = iter([False, False, True])
    assert watched(os.getppid(), lambda: next(looks)) == ([], [])


def test_waiting_process_prints_one_notice_and_exits():
    said, ended = watched(os.getppid(), lambda: False)
    assert len(said) == len(ended) == 1
    assert "rank 1 of 2" in said[0] and "rank 1 of 2" in ended[0]


def test_process_exits_immediately_if_launcher_died():
    start = time.monotonic()
    said, ended = watched(os.getppid() + 1, lambda: False, limit_seconds=60.0)
    assert (len(said), len(ended)) == (0, 1) and time.monotonic() - start < 30


def children(pid: int) -> list[int]:
    """Return the child processes of `pid` that run `fit`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            is_child = folder.joinpath("stat").read_text().rpartition(")")[2].split()[1] == str(pid)
            if is_child and b"fit" in folder.joinpath("cmdline").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # the process has exited
            continue
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc")
def test_second_process_exits_if_first_dies_during_start(tmp_path):
    command = [sys.executable, "-m", "dcvision", "fit", "--config", "vision/digits", "--trainer.accelerator=cpu"]
    command += ["--trainer.devices=2", "--trainer.strategy=ddp", f"--trainer.default_root_dir={tmp_path}"]
    with open(tmp_path / "log", "w") as log:
        first = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        while not (started := children(first.pid)):
            assert first.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        first.kill()
        first.wait()
        deadline = time.monotonic() + 120
        while "error:" not in (tmp_path / "log").read_text() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert (
            "error: rank 1 of 2: the process that started it died before all processes"
            in (tmp_path / "log").read_text()
        )
    finally:
        for pid in started:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
