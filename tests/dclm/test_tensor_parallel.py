"""Tensor parallelism over head groups: agreement with one process for several architectures and meshes."""

import pytest
import torch
import yaml

from dclm import LanguageModel
from dctrain.errors import UserError
from tests.dctrain.commands import record

from .commands import run, small, spawn
from .test_fsdp2 import EXACT, FEW, assert_four_took_the_steps_of_one, losses, weights

HALVES = ["--trainer.strategy=FSDP2Strategy", "--trainer.strategy.tensor_parallel=2"]
LAYERS = "num_layers: 2, dim: 32, mlp_dim: 48, num_heads: 4"
KINDS = {
    "dcformer++": ("dcformer_pp_debug", "windows: [8, null], num_groups: 2"),
    "dcpythia": ("dcpythia_debug", "num_groups: 2, static_base: true, num_kv_heads: 2"),
    "dcformer": ("dcformer_debug", "num_groups: 4, mlp_groups: 4"),
    "baseline": ("dcformer_pp_debug", "pre_compose: false, post_compose: false"),
}
WAYS = {
    "dcformer++": ["--model.recompute=block", "--data.separate_documents=true"],
    "dcpythia": ["--trainer.accumulate_grad_batches=2"],
}


def of_kind(kind: str) -> list[str]:
    model, options = KINDS[kind]
    return [f"--model.model={model}", f"--model.overrides={{{LAYERS}, {options}}}", *WAYS.get(kind, [])]


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_two_by_two_mesh_matches_one_process(corpus, tmp_path, kind):
    few = [*FEW, EXACT, *of_kind(kind)]
    run("fit", *small(corpus, tmp_path / "one"), *few, *record(tmp_path / "one"))
    mesh = [*HALVES, "--trainer.devices=4", "--data.batch_size=2"]
    four = spawn("fit", *small(corpus, tmp_path / "four"), *few, *mesh, *record(tmp_path / "four"))
    assert four.returncode == 0, four.stderr
    assert_four_took_the_steps_of_one(tmp_path)


@pytest.mark.long
def test_tensor_parallel_fused_kernels_are_as_accurate_as_one_process(corpus, tmp_path):
    """In float32, the error of a two-by-two mesh relative to float64 is less than twice that of one process."""
    few = [*FEW, "--trainer.limit_train_batches=2", "--data.context_length=12", "--model.model=dcformer_pp_debug"]
    fused = f"--model.overrides={{{LAYERS}, windows: [8, null], num_groups: 2, impl: triton}}"
    mesh = [*HALVES, "--trainer.devices=4", "--data.batch_size=2", fused]
    for name, options in (("exact", [*of_kind("dcformer++")[:2], EXACT]), ("one", [fused]), ("four", mesh)):
        done = spawn("fit", *small(corpus, tmp_path / name), *few, *options, *record(tmp_path / name), timeout=500)
        assert done.returncode == 0, done.stderr
    exact, one, four = (weights(tmp_path / name) for name in ("exact", "one", "four"))
    errors = [sum(float((state[key] - exact[key]).norm() ** 2) for key in exact) ** 0.5 for state in (one, four)]
    assert errors[1] < 2 * errors[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("num_groups: 1", "trainer.strategy.tensor_parallel=2: num_groups=1 cannot be split over 2 ranks"),
        ("num_groups: 2, mlp_dim: 45", "mlp_dim=45 cannot be split over 2 ranks"),
        ("num_groups: 2, vocab_size: 1", "vocab_size=1 leaves no rows for the last of 2 ranks"),
        ("num_groups: 2, mlp_dim: 48, mlp_groups: 3", "mlp_groups=3 cannot be split over 2 ranks"),
    ],
)
def test_indivisible_sizes_are_rejected(options, message):
    overrides = yaml.safe_load(f"{{{options}}}")
    module = LanguageModel("dcformer_debug", vocab_size=overrides.pop("vocab_size", 257), overrides=overrides)
    with pytest.raises(UserError, match=message):
        module.split_model(0, 2)


MESHES = {
    "one": ["--data.batch_size=4"],
    "2x2": [*HALVES, "--trainer.devices=4", "--data.batch_size=2"],
    "4": ["--trainer.strategy=fsdp2", "--trainer.devices=4", "--data.batch_size=1"],
    "2 replicas": [*HALVES, "--trainer.strategy.replicas=2", "--trainer.devices=4", "--data.batch_size=2"],
}


@pytest.mark.long
@pytest.mark.parametrize("saving", [[], ["--trainer.strategy.async_save=true"]], ids=["", "async"])
def test_run_resumes_on_different_meshes(corpus, tmp_path, saving):
    """Each epoch resumes on a different mesh. The losses and the final weights match those of one process."""
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
