"""Tensor parallelism over head groups: the steps of one process, whichever the architecture and the mesh."""

import pytest
import torch

from tests.dctrain.commands import record

from .commands import run, small, spawn
from .test_fsdp2 import EXACT, FEW, losses, weights

HALVES = ["--trainer.strategy=FSDP2Strategy", "--trainer.strategy.tensor_parallel=2"]
LAYERS = "num_layers: 2, dim: 32, mlp_dim: 48, num_heads: 4"
KINDS = {
    "dcformer++": ("dcformer_pp_debug", "windows: [8, null], num_groups: 2"),
    "dcpythia": ("dcpythia_debug", "num_groups: 2, static_base: true"),
    "twin": ("dcformer_pp_debug", "pre_compose: false, post_compose: false"),
}


def of_kind(kind: str) -> list[str]:
    model, options = KINDS[kind]
    return [f"--model.model={model}", f"--model.overrides={{{LAYERS}, {options}}}"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_by_two_take_the_steps_of_one(corpus, tmp_path, kind):
    few = [*FEW, EXACT, *of_kind(kind)]
    run("fit", *small(corpus, tmp_path / "one"), *few, *record(tmp_path / "one"))
    mesh = [*HALVES, "--trainer.devices=4", "--data.batch_size=2"]
    four = spawn("fit", *small(corpus, tmp_path / "four"), *few, *mesh, *record(tmp_path / "four"))
    assert four.returncode == 0, four.stderr
    assert losses(tmp_path / "four", 4) == pytest.approx(losses(tmp_path / "one", 1), rel=1e-10)
    for key, value in weights(tmp_path / "one").items():
        torch.testing.assert_close(weights(tmp_path / "four")[key], value, rtol=1e-8, atol=1e-10, msg=key)


MESHES = {
    "one": ["--data.batch_size=4"],
    "2x2": [*HALVES, "--trainer.devices=4", "--data.batch_size=2"],
    "4": ["--trainer.strategy=fsdp2", "--trainer.devices=4", "--data.batch_size=1"],
    "2 replicas": [*HALVES, "--trainer.strategy.replicas=2", "--trainer.devices=4", "--data.batch_size=2"],
}


@pytest.mark.long
@pytest.mark.parametrize("saving", [[], ["--trainer.strategy.async_save=true"]], ids=["", "async"])
def test_a_run_moves_between_meshes(corpus, tmp_path, saving):
    """An epoch on each, from the checkpoint of the one before: the steps and the weights of one process."""
    steady = ["--model.warmup_fraction=0", "--model.final_lr_fraction=1", *FEW, "--trainer.limit_train_batches=2"]
    arguments = [*small(corpus, tmp_path), *steady, EXACT, *of_kind("dcformer++")]
    for epoch, (mesh, options) in enumerate([*MESHES.items(), ("one", MESHES["one"])]):
        options = options + (saving if "--trainer.strategy=FSDP2Strategy" in options else [])
        resume = ["--resume=latest"] if epoch else []
        epochs = [f"--trainer.max_epochs={epoch + 1}", *resume]
        done = spawn("fit", *arguments, *options, *epochs, *record(tmp_path / f"moved-{epoch}"))
        assert done.returncode == 0, (mesh, done.stderr)
        assert "other architecture" not in done.stderr
    run("fit", *arguments, "--name=still", f"--trainer.max_epochs={epoch + 1}", *record(tmp_path / "still"))
    still = losses(tmp_path / "still", 1)
    ranks = [1, 4, 4, 4, 1]
    moved = [loss for epoch in range(5) for loss in losses(tmp_path / f"moved-{epoch}", ranks[epoch])]
    assert moved == pytest.approx(still, rel=1e-10)
    for key, value in weights(tmp_path / "still").items():
        torch.testing.assert_close(weights(tmp_path / "t")[key], value, rtol=1e-8, atol=1e-10, msg=key)
