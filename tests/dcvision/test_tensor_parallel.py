"""Tensor parallelism over head groups: training matches one process."""

import pytest
import timm
import torch

import dcvision  # noqa: F401
from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from dcvision.tensor_parallel import split_vit
from tests.dctrain.commands import record
from tests.dctrain.recorder import read

from .commands import run, small, spawn

EXACT = "--trainer.callbacks+=tests.dctrain.recorder.InFloat64"
HALVES = ["--trainer.strategy=FSDP2Strategy", "--trainer.strategy.tensor_parallel=2"]
MODEL = "depth: 2, num_groups: 2, reg_tokens: 2, init_values: 0.1"


@pytest.mark.parametrize(
    ("devices", "batch_size", "random"),
    [
        pytest.param(2, 4, ["--model.mixup_alpha=0.2", "drop_path_rate: 0.2"], id="1x2", marks=pytest.mark.long),
        pytest.param(4, 2, ["--model.mixup_alpha=0", "qk_norm: true"], id="2x2", marks=pytest.mark.long),
    ],
)
def test_tensor_parallel_training_matches_one_process(shards, tmp_path, devices, batch_size, random):
    mixup, options = random
    model = [mixup, f"--model.model_kwargs={{{MODEL}, {options}}}", EXACT]
    few = ["--trainer.max_epochs=1", "--trainer.limit_train_batches=4", "--trainer.limit_val_batches=1"]
    arguments = [*few, *model]
    run("fit", *small(shards, tmp_path / "one"), *arguments, "--data.batch_size=4", *record(tmp_path / "one"))
    mesh = [*HALVES, f"--trainer.devices={devices}", f"--data.batch_size={batch_size}"]
    done = spawn("fit", *small(shards, tmp_path / "more"), *arguments, *mesh, *record(tmp_path / "more"))
    assert done.returncode == 0, done.stderr
    ranks = [read(tmp_path / "more", rank) for rank in range(devices)]
    for batch, one in read(tmp_path / "one").items():
        mean = sum(float.fromhex(rank[batch]["loss"]) for rank in ranks) / devices
        assert mean == pytest.approx(float.fromhex(one["loss"]), rel=1e-10)
    states = [load_checkpoint(newest_checkpoint(tmp_path / name))["state_dict"] for name in ("one", "more")]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-8, atol=1e-10, msg=key)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("dcvit_digits_patch2_8", 2, "num_groups=1 cannot be split over 2 ranks"),
        ("mhavit_digits_patch2_8", 3, "num_heads=4 cannot be split over 3 ranks"),
        ("vit_tiny_patch16_224", 3, "block 0 has Attention and Mlp, which cannot be split; expected DCAttention"),
        ("resnet18", 2, "ResNet has no blocks to split"),
    ],
)
def test_model_that_cannot_be_split_raises_error(name, ranks, message):
    with pytest.raises(ValueError, match=message):
        split_vit(timm.create_model(name), ranks)


def test_fsdp2_rejects_batch_norm(shards, tmp_path, capsys):
    model = ["--model.model=resnet10t", "--model.model_kwargs={}", "--trainer.strategy=fsdp2"]
    with pytest.raises(SystemExit):
        run("fit", *small(shards, tmp_path), *model)
    assert "is a batch norm, which FSDP2 does not support; use ddp" in capsys.readouterr().err
