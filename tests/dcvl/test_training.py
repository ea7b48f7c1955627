"""Training of both towers: one process or several, stopped and resumed."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dctrain.checkpoint import find_checkpoint, load_checkpoint
from tests.dctrain.commands import record
from tests.dctrain.recorder import losses, read
from tests.faults.drill import mistake

from .commands import run, small, spawn

EXACT = "--trainer.callbacks+=tests.dctrain.recorder.InFloat64"


def weights(folder) -> dict[str, torch.Tensor]:
    return load_checkpoint(find_checkpoint(str(folder)))["state_dict"]


def validated(folder) -> dict[str, float]:
    """The last validation of a run."""
    (events,) = (folder / "t/version_0").rglob("events.out.tfevents.*")
    curves = EventAccumulator(str(events)).Reload()
    found = {tag: curves.Scalars(tag)[-1].value for tag in curves.Tags()["scalars"]}
    return {tag.removeprefix("val/"): value for tag, value in found.items() if tag.startswith("val/")}


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("ddp", "sigmoid"),
        pytest.param("fsdp2", "softmax", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_take_the_steps_of_one(tmp_path, strategy, kind):
    """Texts of every rank are contrasted with images of every other, and gradients flow back to them."""
    extra = [f"--model.contrastive={kind}", EXACT]
    run("fit", *small(tmp_path / "one"), *extra, *record(tmp_path / "one"))
    two = [f"--trainer.strategy={strategy}", "--trainer.devices=2", "--data.batch_size=2"]
    finished = spawn("fit", *small(tmp_path / "two"), *extra, *two, *record(tmp_path / "two"))
    assert finished.returncode == 0, finished.stderr[-2000:]
    assert losses(tmp_path / "two", 2) == pytest.approx(losses(tmp_path / "one", 1), rel=1e-10)
    got = weights(tmp_path / "two")
    for key, value in weights(tmp_path / "one").items():
        torch.testing.assert_close(got[key], value, rtol=1e-8, atol=1e-10, msg=key)
    one, two = validated(tmp_path / "one"), validated(tmp_path / "two")
    for curve in ("caption_loss", "image_to_text", "text_to_image"):  # of six images, which two ranks pad
        assert two[curve] == pytest.approx(one[curve], rel=1e-6), curve


def test_a_resumed_run_is_one_never_interrupted(tmp_path):
    run("fit", *small(tmp_path / "whole"), *record(tmp_path / "whole"))
    stopped = spawn("fit", *small(tmp_path), *record(tmp_path / "parts", at=3))
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    run("fit", *small(tmp_path), "--resume", str(tmp_path / "t/version_0"), *record(tmp_path / "parts"))
    whole, parts = read(tmp_path / "whole"), read(tmp_path / "parts")
    assert list(parts) == list(whole) == list(range(6))
    assert parts == whole
    expected, got = (weights(folder) for folder in (tmp_path / "whole", tmp_path / "t/version_0"))
    assert all(torch.equal(got[key], value) for key, value in expected.items())


@pytest.mark.parametrize(
    ("arguments", "layers", "curves"),
    [
        ([], 1, {"loss", "contrastive_loss", "caption_loss", "image_to_text", "text_to_image"}),
        (["--model.contrastive=null"], 2, {"loss", "caption_loss"}),
        (["--model.caption_weight=0"], 0, {"loss", "contrastive_loss", "image_to_text", "text_to_image"}),
    ],
)
def test_each_loss_alone_and_both(tmp_path, arguments, layers, curves):
    run("fit", *small(tmp_path), "--trainer.max_steps=2", *arguments)
    content = load_checkpoint(find_checkpoint(str(tmp_path / "t/version_0")))
    looking = {key.split(".")[3] for key in content["state_dict"] if ".cross." in key}
    assert looking == {"1", "0"} if layers == 2 else len(looking) == layers
    (where,) = json.loads((tmp_path / "t/version_0/environment.json").read_text())
    assert where["torch"] == torch.__version__ and "commit" in where
    assert set(validated(tmp_path)) == curves


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.batch_size=1"], "data.batch_size=1 on one rank: a contrastive loss takes two pairs at least"),
        (["--model.contrastive=null", "--model.caption_weight=0"], "leave no loss"),
        (["--model.contrastive_weight=0"], "contrastive_weight=0 trains nothing of what is contrasted"),
        (["--model.cross_layers=0"], "cross_layers=0 with caption_weight=1.0"),
        (["--model.cross_layers=3"], "cross_layers=3 must be from 0 to num_layers=2"),
        (["--model.text_overrides.context_dim=8"], "text_overrides must not hold ['context_dim']"),
        (["--model.text_overrides.is_causal=false"], "text_overrides.is_causal=false"),
        (["--model.text_model=gpt"], "model 'gpt' is unknown"),
        (["--model.model=vit"], "model 'vit' is unknown to timm"),
        (["--data.train=shards:none.tar"], "data.tokenizer must name the tokenizer of the captions"),
        (["--data.train=pictures", "--data.tokenizer=bytes"], "data set 'pictures' is unknown; accepted: scenes"),
        (["--data.train=scenes:test"], "scenes:test is unknown; accepted: scenes:train, scenes:val, scenes:unseen"),
        (["--data.val_samples=null"], "data.val=scenes has no end; data.val_samples must say how many count"),
        (["--data.context_length=2"], "context_length=2 must be at least 3"),
    ],
)
def test_mistakes(tmp_path, capsys, arguments, message):
    assert message in mistake(capsys, run, "fit", *small(tmp_path), *arguments)
