"""Initial weights of image models: from runs, exports and timm, with different sizes, classes and averaged weights."""

import pytest
import timm
import torch

from dctrain.checkpointing.checkpoint import load_checkpoint, newest_checkpoint
from dcvision.compat_checks import normalization
from tests.faults.fault_injection import mistake

from .commands import run

STILL = ["--model.lr=0", "--trainer.max_epochs=1", "--trainer.limit_train_batches=1", "--trainer.limit_val_batches=1"]
COMMON = [
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    *(
        "--data.batch_size=32",
        "--trainer.limit_train_batches=4",
        "--name=t",
        "--data.train=digits",
        "--data.val=digits",
    ),
]


def common(root) -> list[str]:
    return [*COMMON, f"--trainer.default_root_dir={root}"]


def weights(folder) -> dict[str, torch.Tensor]:
    return load_checkpoint(newest_checkpoint(folder))["state_dict"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a run that trained the MHA baseline on the digits for one epoch of four batches."""
    root = tmp_path_factory.mktemp("plain")
    run("fit", *common(root), "--model.model=mhavit_digits_patch2_8", "--trainer.max_epochs=1")
    return root / "t/version_0"


def test_dcmha_model_is_initialized_from_mha_run(trained, tmp_path, capsys):
    average = "--model.ema_decay=0.5"
    run("fit", *common(tmp_path / "new"), "--model.model=dcvit_digits_patch2_8", *STILL, average, f"--init={trained}")
    assert f"initial weights from {trained}; " in capsys.readouterr().out
    before, now = weights(trained), weights(tmp_path / "new")
    assert all(torch.equal(now[name], weight) for name, weight in before.items() if name.startswith("model."))
    new = [name for name in now if name.startswith("model.") and name not in before]
    assert new and all(".compose." in name for name in new)
    for name, weight in now.items():
        if name.startswith("ema.module."):
            torch.testing.assert_close(weight, now[name.replace("ema.module.", "model.")])


def test_checkpoint_with_different_number_of_heads_is_rejected(trained, capsys):
    """The number of heads does not change the shapes of the tensors."""
    asked = ["validate", f"--config={trained / 'config.yaml'}", f"--checkpoint={trained}"]
    run(*asked)
    said = mistake(capsys, run, *asked, "--model.model_kwargs.num_heads=2")
    assert "the checkpoint has 4 heads in blocks.0.attn; the model has 2" in said


def test_init_from_export_with_different_classes_and_image_size(trained, tmp_path):
    run("export", f"--checkpoint={trained}", f"--out={tmp_path / 'exported'}")
    other = ["--model.model=mhavit_digits_patch2_8", "--data.image_size=12", "--data.num_classes=12"]
    run("fit", *common(tmp_path / "new"), *other, *STILL, f"--init={tmp_path / 'exported'}")
    before, now = weights(trained), weights(tmp_path / "new")
    different = [name for name in before if name.startswith("model.") and now[name].shape != before[name].shape]
    assert sorted(different) == sorted(n for n in different if "head" in n or "pos_embed" in n) and different
    assert torch.equal(now["model.blocks.0.attn.qkv.weight"], before["model.blocks.0.attn.qkv.weight"])


def test_init_loads_timm_weights_by_model_name(tmp_path, capsys, monkeypatch):
    """A swapped timm model starts from the weights of the original model; a stub replaces the download."""
    made = timm.create_model("test_vit", num_classes=10, img_size=16)
    asked = []
    create = timm.create_model

    def offline(model_name, pretrained=False, **kwargs):
        return asked.append(model_name) or made if pretrained else create(model_name, **kwargs)

    monkeypatch.setattr(timm, "create_model", offline)
    swapped = ["--model.model=test_vit", "--model.swap={}", "--data.image_size=16"]
    run("fit", *common(tmp_path / "new"), *swapped, *STILL, "--init=test_vit.r160_in1k")
    assert asked == ["test_vit.r160_in1k"]
    now = weights(tmp_path / "new")
    assert all(torch.equal(now[f"model.{name}"], weight) for name, weight in made.state_dict().items())


@pytest.mark.parametrize(
    ("model", "init", "message"),
    [
        ("dcvit_digits_patch2_8", "nothing", "nothing is not a file, folder or timm model"),
        ("dcvit_digits_patch2_8 num_heads=2", None, "has 4 heads in blocks.0.attn; the model has 2"),
        (
            "dcvit_digits_patch2_8 pretrained_cfg_overlay={std: [0.25, 0.25, 0.25]}",
            None,
            "normalizes images with mean [0.5, 0.5, 0.5] and std [0.5, 0.5, 0.5], the model with mean [0.5, 0.5, 0.5] "
            "and std [0.25, 0.25, 0.25]",
        ),
        ("test_resnet", None, "does not match the model: of its tensors"),
    ],
)
def test_incompatible_initial_weights_are_rejected(trained, tmp_path, capsys, model, init, message):
    name, _, option = model.partition(" ")
    asked = [f"--model.model={name}", *([f"--model.model_kwargs.{option}"] if option else [])]
    source = f"--init={init or trained}"
    assert message in mistake(capsys, run, "fit", *common(tmp_path / "new"), *asked, *STILL, source)


def test_normalization_of_initial_weights_is_kept_in_export(tmp_path):
    """The option named in the error message sets the normalization of the new run, and an export keeps it."""
    scaled = "--model.model_kwargs.pretrained_cfg_overlay={mean: [0.1, 0.2, 0.3], std: [0.5, 0.4, 0.3]}"
    run("fit", *common(tmp_path / "a"), scaled, *STILL)
    run("fit", *common(tmp_path / "b"), scaled, *STILL, f"--init={tmp_path / 'a/t/version_0'}")
    run("export", f"--checkpoint={tmp_path / 'b/t/version_0'}", f"--out={tmp_path / 'exported'}")
    model = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True)
    assert normalization(model) == {"mean": [0.1, 0.2, 0.3], "std": [0.5, 0.4, 0.3]}
