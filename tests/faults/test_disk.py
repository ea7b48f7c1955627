"""Full disk: the error is one line that names the file, no partial file is left, and the next start succeeds.

A limit on the file size simulates the full disk. The system reports "File too large" instead of "No space left on
device".
"""

import json
import subprocess
from pathlib import Path

import pytest

from tests.dclm.commands import small as small_lm
from tests.dctrain.commands import spawn
from tests.dcvision.commands import small

from .fault_injection import image_folder


def fail(program: str, limit: int, *args: str) -> str:
    """Run a program with a file size limit that makes it fail, and return its last line."""
    result = start(program, limit, *args)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("error: ") and "File too large" in line
    return line


def start(program: str, limit: int, *args: str) -> subprocess.CompletedProcess:
    return spawn(str(limit), program, *args, prefix=("-m", "tests.faults.limited"))


def succeed(program: str, *args: str) -> str:
    result = spawn(*args, prefix=("-m", program))
    assert result.returncode == 0, result.stderr
    return result.stdout


def leftovers(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if "partial" in path.name or path.name.startswith("tmp")]


@pytest.mark.long
@pytest.mark.parametrize(("limit", "where"), [(50, ""), (20_000, "last-step=0.ckpt")])
def test_full_disk_at_start_of_run_leaves_no_files(shards, tmp_path, limit, where):
    arguments = ["fit", *small(shards, tmp_path / "root"), "--trainer.max_epochs=1"]
    assert where in fail("dcvision", limit, *arguments)
    assert not list((tmp_path / "root").rglob("*"))
    succeed("dcvision", *arguments)


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["auto", "fsdp2"])
def test_full_disk_in_middle_of_run_preserves_first_checkpoint(shards, tmp_path, strategy):
    """Later checkpoints include optimizer state and exceed the limit; the first checkpoint is kept."""
    common = [*small(shards, tmp_path / "root"), f"--trainer.strategy={strategy}"]
    arguments = ["fit", *common, "--checkpoint_every_n_steps=3"]
    assert "last-step=3.ckpt" in fail("dcvision", 900_000, *arguments)
    folder = tmp_path / "root/t/version_0"
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["last-step=0.ckpt"]
    succeed("dcvision", *arguments, f"--resume={folder}")
    assert not leftovers(tmp_path)


@pytest.mark.long
def test_full_disk_during_data_preparation_leaves_no_partial_files(tmp_path):
    folder = image_folder(tmp_path / "images")
    shards = ["shards", f"--folder={folder}", f"--out={tmp_path}/shards", "--num_shards=2", "--num_workers=1"]
    assert "train-0000.tar" in fail("dcvision", 1000, *shards)
    (tmp_path / "a.txt").write_text("some text " * 1000)
    tokens = ["tokens", f"--inputs={tmp_path}/a.txt", f"--out={tmp_path}/corpus"]
    fail("dclm", 3000, *tokens)
    assert not leftovers(tmp_path)
    assert "4 images of 2 classes" in succeed("dcvision", *shards)
    assert "9,001 train tokens, 1,001 val tokens" in succeed("dclm", *tokens)


@pytest.mark.long
def test_full_disk_for_caches_leaves_no_partial_files(shards, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ["fit", *small(shards, tmp_path / "root"), "--trainer.max_epochs=1"]
    assert ".npz" in fail("dcvision", 300, *arguments)
    digits = ["--data.train=digits", "--data.val=digits", "--trainer.max_steps=3"]
    assert "train-0.tar" in fail("dcvision", 10_000, *arguments, *digits)
    assert not leftovers(tmp_path)
    succeed("dcvision", *arguments, *digits)


@pytest.mark.long
def test_full_disk_during_export_leaves_no_partial_files(shards, corpus, tmp_path):
    succeed("dcvision", "fit", *small(shards, tmp_path), "--trainer.max_steps=3")
    export = ["export", f"--checkpoint={tmp_path}/t/version_0", f"--out={tmp_path}/exported"]
    fail("dcvision", 20_000, *export)
    assert not (tmp_path / "exported").exists() and not leftovers(tmp_path)
    succeed("dcvision", *export)
    bigger = ["--model.overrides={num_layers: 2, dim: 32, mlp_dim: 64, windows: [8, null]}"]
    succeed("dclm", "fit", *small_lm(corpus, tmp_path / "lm"), *bigger, "--trainer.max_steps=3")
    export = ["export", f"--checkpoint={tmp_path}/lm/t/version_0", f"--out={tmp_path}/exported_lm"]
    fail("dclm", 20_000, *export)
    assert not (tmp_path / "exported_lm").exists() and not leftovers(tmp_path)
    succeed("dclm", *export)
    assert json.loads((tmp_path / "exported_lm/config.json").read_text())["model_type"]
