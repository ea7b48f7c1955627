"""Sharded checkpoints: loading by all commands, rejection of damaged checkpoints, and failed saves."""

import errno
import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from dctrain.checkpointing import async_save
from dctrain.checkpointing.checkpoint import check_resumable, find_checkpoint, load_checkpoint, newest_checkpoint
from dctrain.checkpointing.lightning_io import AtomicCheckpointIO
from dctrain.checkpointing.sharded import as_local_shard
from dctrain.errors import UserError
from tests.dctrain.commands import record
from tests.dctrain.recorder import read

from .commands import run, small
from .data.corpora import numbered_corpus

SHARDED = "--trainer.strategy=fsdp2"
FEW = ["--trainer.limit_train_batches=3", "--trainer.limit_val_batches=1"]
STEADY = ["--model.warmup_fraction=0", "--model.final_lr_fraction=1"]  # constant lr for any number of steps


@pytest.fixture(scope="module")
def run_of_one_rank(tmp_path_factory) -> Path:
    """Return the folder of a sharded run of one epoch."""
    root = tmp_path_factory.mktemp("sharded")
    corpus = numbered_corpus(root / "corpus", 41 * 24 + 1, 7 * 24 + 1)
    run("fit", *small(corpus, root), *FEW, *STEADY, "--trainer.max_epochs=1", SHARDED)
    return root / "t"


@pytest.fixture
def trained(run_of_one_rank, tmp_path) -> Path:
    """Return a modifiable copy of the last checkpoint of the run."""
    shutil.copytree(run_of_one_rank, tmp_path / "t")
    (last,) = tmp_path.glob("t/version_0/checkpoints/last-*.ckpt")
    return last


def test_checkpoint_folder_contains_only_index_data_and_metadata(trained):
    assert find_checkpoint(str(trained)) == trained == find_checkpoint(str(trained.parents[1]))
    assert sorted(path.name for path in trained.iterdir()) == ["__0_0.distcp", "index.json", "meta.pt"]
    assert sorted(path.name.split("-")[0] for path in trained.parent.iterdir()) == ["best", "last"]
    check_resumable(trained)


def test_sharded_and_single_file_checkpoints_resume_under_either_strategy(trained, corpus, tmp_path):
    """A run without sharding resumes from a sharded checkpoint, and a sharded run resumes from a single file."""
    again = [*FEW, *STEADY, "--trainer.max_epochs=2"]
    run("fit", *small(corpus, tmp_path), *again, f"--resume={trained}", *record(tmp_path / "one"))
    run("fit", *small(corpus, tmp_path / "file"), *FEW, *STEADY, "--trainer.max_epochs=1")
    file = newest_checkpoint(tmp_path / "file")
    assert file.is_file()
    run("fit", *small(corpus, tmp_path / "file"), *again, SHARDED, f"--resume={file}", *record(tmp_path / "sharded"))
    one, sharded = (read(tmp_path / name) for name in ("one", "sharded"))
    assert list(one) == [3, 4, 5]
    for batch, record_of_one in one.items():
        assert sharded[batch]["samples"] == record_of_one["samples"]
        losses = [float.fromhex(r["loss"]) for r in (record_of_one, sharded[batch])]
        assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_commands_load_sharded_checkpoint(trained, corpus, tmp_path, capsys):
    run("validate", *small(corpus, tmp_path), f"--checkpoint={trained}")
    validated = capsys.readouterr().out
    run("validate", *small(corpus, tmp_path), f"--checkpoint={trained}", SHARDED)
    assert "val/loss" in validated and "val/loss" in capsys.readouterr().out
    run("generate", f"--checkpoint={trained}", "--prompt=abc", "--max_new_tokens=3", "--seed=0")
    run("export", f"--checkpoint={trained}", f"--out={tmp_path / 'exported'}")
    run(
        "generate",
        f"--checkpoint={tmp_path / 'exported'}",
        "--prompt=abc",
        "--max_new_tokens=3",
        "--seed=0",
        "--tokenizer=bytes",
    )
    first, *_, second = capsys.readouterr().out.strip().splitlines()
    assert first == second


def _damage(trained: Path, kind: str) -> None:
    data = trained / "__0_0.distcp"
    match kind:
        case "missing":
            data.unlink()
        case "cut off":
            os.truncate(data, data.stat().st_size - 100)
        case "flipped":
            content = bytearray(data.read_bytes())
            content[::1000] = bytes(x ^ 1 for x in content[::1000])
            data.write_bytes(content)
        case "no index":
            (trained / "index.json").unlink()
        case "index":
            (trained / "index.json").write_bytes(b"x")
        case "meta":
            (trained / "meta.pt").write_bytes(b"x")


@pytest.mark.parametrize("command", [["fit", "--resume"], ["validate", "--checkpoint"], ["generate", "--checkpoint"]])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("missing", "is not a complete checkpoint: its file __0_0.distcp is missing."),
        ("cut off", "is not a complete checkpoint: its file __0_0.distcp is truncated at"),
        ("flipped", "is damaged: its file __0_0.distcp does not match its checksum."),
        ("no index", "is not a complete checkpoint: it has no index.json."),
        ("index", "index.json is not a valid index of a checkpoint (JSONDecodeError"),
        ("meta", "meta.pt cannot be read"),
    ],
)
def test_damaged_checkpoints_are_rejected(trained, corpus, tmp_path, capsys, kind, message, command):
    _damage(trained, kind)
    more = ["--prompt=a"] if command[0] == "generate" else small(corpus, tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        run(command[0], f"{command[1]}={trained}", *more)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") < 3


def test_checkpoint_of_different_architecture_is_rejected(trained, corpus, tmp_path, capsys):
    other = "--model.overrides={num_layers: 3, dim: 32, mlp_dim: 48, windows: [8, null]}"
    for strategy in (SHARDED, "--trainer.strategy=auto"):
        with pytest.raises(SystemExit):
            run("fit", *small(corpus, tmp_path), other, strategy, f"--resume={trained}")
        assert "the checkpoint has a different architecture" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["tensors", "meta"])
@pytest.mark.parametrize(
    "strategy",
    [["fsdp2"], ["FSDP2Strategy", "--trainer.strategy.async_save=true"]],
    ids=["", "async"],
)
def test_full_disk_keeps_previous_checkpoint(corpus, tmp_path, capsys, monkeypatch, where, strategy):
    """The second checkpoint leaves no files, and the first checkpoint remains."""
    saved = []

    def full(*args, **kwargs):
        saved.append(1)
        if len(saved) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(*args, **kwargs)

    owner, name = (dcp.FileSystemWriter, "write_data") if where == "tensors" else (async_save, "atomic_write")
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(SystemExit) as exit_info:
        run(
            "fit",
            *small(corpus, tmp_path),
            *FEW,
            f"--trainer.strategy={strategy[0]}",
            *strategy[1:],
            "--checkpoint_every_n_steps=2",
        )
    assert exit_info.value.code == 2
    assert "No space left on device" in capsys.readouterr().err
    folder = tmp_path / "t/version_0/checkpoints"
    assert [path.name for path in folder.iterdir()] == ["last-step=0.ckpt"]
    assert load_checkpoint(folder / "last-step=0.ckpt")["global_step"] == 0


def test_failed_replacement_keeps_sharded_checkpoint(trained, monkeypatch):
    content = load_checkpoint(trained, with_optimizer=True)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(torch, "save", full)
        AtomicCheckpointIO().save_checkpoint(content, trained)
    check_resumable(trained)
    AtomicCheckpointIO().save_checkpoint(content, trained)
    assert trained.is_file()
    check_resumable(trained)
    assert {path.name.split("-")[0] for path in trained.parent.iterdir()} == {"best", "last"}


def test_weights_only_checkpoint_loads_but_cannot_be_resumed(corpus, tmp_path, capsys):
    weights_alone = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.save_weights_only=true"]
    named = [f"--trainer.callbacks.dirpath={tmp_path}/alone", "--trainer.callbacks.filename=a"]
    run("fit", *small(corpus, tmp_path), *FEW, "--trainer.max_epochs=1", SHARDED, *weights_alone, *named)
    run("generate", f"--checkpoint={tmp_path}/alone/a.ckpt", "--prompt=abc", "--max_new_tokens=3")
    for strategy in (SHARDED, "--trainer.strategy=auto"):
        with pytest.raises(SystemExit):
            run("fit", *small(corpus, tmp_path), strategy, f"--resume={tmp_path}/alone/a.ckpt")
        assert "cannot be resumed: it has no" in capsys.readouterr().err


def test_background_save_stores_state_at_time_of_call(tmp_path, monkeypatch):
    """Later changes of the state do not affect the checkpoint, even if the write is delayed."""
    go_on = threading.Event()
    begin = async_save._begin
    monkeypatch.setattr(async_save, "_begin", lambda *args: go_on.wait(30) and begin(*args))
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        saving = async_save.ShardedCheckpointWriter(in_background=True)
        x, meta = torch.ones(3), {"best": {"a": 1}, "optimizer_states": [{"param_groups": []}]}
        saving.save(tmp_path / "a.ckpt", {"state_dict.x": as_local_shard(x)}, meta)
        x.zero_(), meta["best"].clear()
        assert saving.is_saving and not (tmp_path / "a.ckpt").exists()
        go_on.set()
        saving.finish()
    finally:
        torch.distributed.destroy_process_group()
    saved = load_checkpoint(tmp_path / "a.ckpt")
    assert saved["best"] == {"a": 1} and saved["state_dict"]["x"].tolist() == [1, 1, 1]


def test_unfinished_checkpoint_is_not_found(trained):
    os.replace(trained, trained.with_name(f"{trained.name}.0.partial"))
    assert find_checkpoint(str(trained.parent)).name.startswith("best-")
    for best in trained.parent.glob("best-*"):
        os.replace(best, best.with_name(f"{best.name}.0.partial"))
    with pytest.raises(UserError, match="no checkpoint"):
        find_checkpoint(str(trained.parent))
