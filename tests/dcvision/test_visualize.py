"""Images of attention and composition, as files and in TensorBoard."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchvision.io import decode_image

from dctrain.errors import UserError
from dcvision import callbacks, visualize
from tests.dcvision.commands import run

SHORT = [
    *("--config=configs/vision/digits.yaml", "--trainer.max_epochs=1", "--trainer.limit_train_batches=2"),
    *("--trainer.limit_val_batches=2", "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"),
    *("--model.warmup_steps=0", "--model.model_kwargs.depth=2", "--name=t"),
]


@pytest.fixture
def image(tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(torch.randint(255, (12, 20, 3), dtype=torch.uint8).numpy()).save(path)
    return str(path)


def test_visualize_writes_images_of_all_layers_and_rejects_invalid_input(tmp_path, image, capsys):
    run("fit", *SHORT, f"--trainer.default_root_dir={tmp_path}")
    checkpoint, folder = str(tmp_path / "t/version_0"), tmp_path / "pictures"
    run("visualize", f"--checkpoint={checkpoint}", f"--image={image}", f"--out={folder}", "--query=3")
    names = ["blocks.0.attn", "blocks.1.attn", "compositions"]
    out = capsys.readouterr().out
    for name in names:
        assert str(folder / f"{name}.png") in out
        picture = decode_image(str(folder / f"{name}.png"))[:3].float()
        assert min(picture.shape[1:]) > 300 and (picture.flatten(1).std(1) > 5).all()
    log = EventAccumulator(str(folder)).Reload()
    assert sorted(log.Tags()["images"]) == [f"attention/{name}" for name in names]
    with pytest.raises(UserError, match="cannot create the folder .*image.png"):
        visualize.visualize(checkpoint, image, image)
    for arguments, message in (
        (
            [f"--checkpoint={checkpoint}", f"--image={image}", "--query=16"],
            "query=16; expected 0 to 15 for 4 x 4 patches",
        ),
        ([f"--checkpoint={checkpoint}", f"--image={tmp_path}/none.png"], "none.png: No such file"),
        ([f"--checkpoint={tmp_path}/nowhere", f"--image={image}"], "no checkpoint"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            run("visualize", *arguments, f"--out={folder}")
        assert exit_info.value.code == 2 and message in capsys.readouterr().err


def test_visualize_rejects_model_without_composed_attention(tmp_path, image, capsys):
    model = ["--model.model=vit_tiny_patch16_224", "--model.model_kwargs={depth: 1, patch_size: 4}"]
    run("fit", *SHORT[:-2], *model, "--name=t", f"--trainer.default_root_dir={tmp_path}")
    with pytest.raises(SystemExit):
        run("visualize", f"--checkpoint={tmp_path}/t/version_0", f"--image={image}", f"--out={tmp_path}/pictures")
    assert "VisionTransformer has no composed" in capsys.readouterr().err


def read_run(folder) -> EventAccumulator:
    return EventAccumulator(str(folder / "version_0"), size_guidance={"images": 0}).Reload()


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.slow, id="raw"),
        pytest.param(["--model.ema_decay=0.9"], marks=pytest.mark.slow, id="averaged"),
    ],
)
def test_callback_logs_images_and_does_not_change_training(tmp_path, image, more):
    """Images of the evaluated weights are logged at the start and after every epoch; all losses are unchanged."""
    callback = ["--trainer.callbacks+=AttentionImages", f"--trainer.callbacks.image={image}"]
    root = [f"--trainer.default_root_dir={tmp_path}", "--trainer.log_every_n_steps=1", "--trainer.max_epochs=2"]
    run("fit", *SHORT, *root, *more, "--name=plain")
    run("fit", *SHORT, *root, *more, *callback, "--name=looked")
    plain, looked = read_run(tmp_path / "plain"), read_run(tmp_path / "looked")
    assert plain.Tags()["images"] == []
    for tag in ("train/loss", "train/grad_norm", "val/loss"):
        assert [(e.step, e.value) for e in looked.Scalars(tag)] == [(e.step, e.value) for e in plain.Scalars(tag)]
    for name in ("blocks.0.attn", "blocks.1.attn", "compositions"):
        events = looked.Images(f"attention/{name}")
        assert [event.step for event in events] == [0, 2, 4]
        assert len({event.encoded_image_string for event in events}) == 3


def test_callback_rejects_invalid_input(tmp_path, image, capsys):
    other = ["--model.model=vit_tiny_patch16_224", "--model.model_kwargs={depth: 1, patch_size: 4}"]
    for arguments, message in (
        ([f"--trainer.callbacks.image={tmp_path}/none.png"], "none.png: No such file"),
        ([f"--trainer.callbacks.image={image}", "--trainer.callbacks.query=-1"], "query=-1; expected 0 to 15"),
        ([f"--trainer.callbacks.image={image}", *other], "VisionTransformer has no composed"),
        ([f"--trainer.callbacks.image={image}", "--trainer.logger=false"], "requires a TensorBoard logger"),
    ):
        with pytest.raises(SystemExit) as exit_info:
            run(
                "fit",
                *SHORT,
                "--trainer.callbacks+=AttentionImages",
                *arguments,
                f"--trainer.default_root_dir={tmp_path}",
            )
        assert exit_info.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_fast_dev_run_logs_no_images_and_predict_needs_no_image_file(tmp_path, image):
    callback = ["--trainer.callbacks+=AttentionImages", f"--trainer.callbacks.image={image}"]
    root = f"--trainer.default_root_dir={tmp_path}"
    run("fit", *SHORT, *callback, root, "--trainer.fast_dev_run=true")
    assert not list(tmp_path.rglob("events.out.tfevents.*"))
    run("fit", *SHORT, *callback, root)
    Path(image).unlink()
    config = ["--config", str(tmp_path / "t/version_0/config.yaml"), f"--checkpoint={tmp_path / 't/version_0'}"]
    run("predict", *config, root, "--trainer.limit_predict_batches=1")
    assert len(list(tmp_path.rglob("predictions.csv"))) == 1


def test_command_and_callback_draw_same_attention(tmp_path, image, monkeypatch):
    """Both use the preprocessing of training and the weights that are evaluated."""
    seen, draw = [], visualize.draw_attention

    def spy(recorded, view):
        seen.append(dict(recorded))
        return draw(recorded, view)

    for module in (visualize, callbacks):
        monkeypatch.setattr(module, "draw_attention", spy)
    callback = ["--trainer.callbacks+=AttentionImages", f"--trainer.callbacks.image={image}"]
    run("fit", *SHORT, *callback, "--model.ema_decay=0.5", f"--trainer.default_root_dir={tmp_path}")
    visualize.visualize(str(tmp_path / "t/version_0"), image, str(tmp_path / "pictures"))
    assert len(seen) == 3 and seen[1].keys() == seen[2].keys()
    for name, one in seen[2].items():
        torch.testing.assert_close(one.maps.composed_weights, seen[1][name].maps.composed_weights)
        assert not torch.allclose(one.maps.composed_weights, seen[0][name].maps.composed_weights)
