"""Training of both towers with one or several processes, and resume after a stop."""

import itertools
import json

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dctrain.checkpointing.checkpoint import find_checkpoint, load_checkpoint, newest_checkpoint
from dcvl import CaptionDataModule
from tests.dctrain.commands import ROOT, record
from tests.dctrain.recorder import losses, read
from tests.faults.fault_injection import mistake

from .commands import captioned_shard, other_words, run, small, spawn

EXACT = "--trainer.callbacks+=tests.dctrain.recorder.InFloat64"


def weights(folder) -> dict[str, torch.Tensor]:
    return load_checkpoint(newest_checkpoint(folder))["state_dict"]


def validated(folder) -> dict[str, float]:
    """Return the metrics of the last validation of a run."""
    (events,) = (folder / "t/version_0").rglob("events.out.tfevents.*")
    curves = EventAccumulator(str(events)).Reload()
    found = {tag: curves.Scalars(tag)[-1].value for tag in curves.Tags()["scalars"]}
    return {tag.removeprefix("val/"): value for tag, value in found.items() if tag.startswith("val/")}


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        pytest.param("ddp", "sigmoid", marks=pytest.mark.long),
        pytest.param("fsdp2", "softmax", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_match_one_rank(tmp_path, strategy, kind):
    """The loss contrasts texts and images of all ranks, and gradients flow back to all ranks."""
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
    for curve in ("caption_loss", "image_to_text", "text_to_image"):  # six images, padded for two ranks
        assert two[curve] == pytest.approx(one[curve], rel=1e-6), curve


@pytest.mark.slow
def test_resumed_run_equals_uninterrupted_run(tmp_path):
    run("fit", *small(tmp_path / "whole"), *record(tmp_path / "whole"))
    stopped = spawn("fit", *small(tmp_path), *record(tmp_path / "parts", at=3))
    assert stopped.returncode == 0, stopped.stderr[-2000:]
    run("fit", *small(tmp_path), "--resume", str(tmp_path / "t/version_0"), *record(tmp_path / "parts"))
    whole, parts = read(tmp_path / "whole"), read(tmp_path / "parts")
    assert list(parts) == list(whole) == list(range(6))
    assert parts == whole
    expected, got = (weights(folder) for folder in (tmp_path / "whole", tmp_path / "t/version_0"))
    assert all(torch.equal(got[key], value) for key, value in expected.items())


@pytest.mark.slow
def test_truncated_captions_are_counted_and_tokenizer_change_is_rejected(tmp_path, capsys):
    run("fit", *small(tmp_path), "--trainer.max_steps=2", "--data.context_length=9")
    printed = capsys.readouterr().out
    assert printed.count("captions are longer than data.context_length=9 and are truncated") == 1
    (events,) = (tmp_path / "t/version_0").rglob("events.out.tfevents.*")
    cut = EventAccumulator(str(events)).Reload().Scalars("train/cut_captions")
    whole = CaptionDataModule(batch_size=4, val_samples=6)
    whole.setup("fit")
    batches = itertools.islice(whole.train_dataloader(), 2)
    long = list(itertools.accumulate(int((batch.texts.ends > 8).sum()) for batch in batches))
    assert [scalar.value for scalar in cut] == long and 0 < long[1] < 8
    resumed = [*small(tmp_path), f"--resume={tmp_path / 't/version_0'}", "--data.context_length=9"]
    other = f"--data.tokenizer={other_words(tmp_path / 'other.json')}"
    assert "trained with a different data.tokenizer" in mistake(capsys, run, "fit", *resumed, other)
    run("fit", *resumed, "--trainer.max_steps=4")
    events = sorted((tmp_path / "t/version_0").rglob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime)
    assert EventAccumulator(str(events[-1])).Reload().Scalars("train/cut_captions")[0].value >= long[1]


def test_captions_truncated_in_evaluation_are_not_counted(tmp_path, capsys):
    spec = f"shards:{captioned_shard(tmp_path / 'long.tar', ['a long caption'] * 4)}"
    data = ["--data.train=scenes", f"--data.val={spec}", "--data.tokenizer=bytes", "--data.val_samples=null"]
    scenes = f"shards:{captioned_shard(tmp_path / 'short.tar', ['short'] * 4)}"
    run("fit", *small(tmp_path), "--trainer.max_steps=2", *data, f"--data.train={scenes}", "--data.context_length=9")
    (events,) = (tmp_path / "t/version_0").rglob("events.out.tfevents.*")
    cut = EventAccumulator(str(events)).Reload().Scalars("train/cut_captions")
    assert [scalar.value for scalar in cut] == [0, 0]
    assert "captions are longer than data.context_length=9" in capsys.readouterr().out


def test_checkpoint_of_different_model_is_rejected(tmp_path, capsys):
    """The tensors of models with different heads have the same shapes."""
    plain = ["--model.model=mhavit_small_patch4_32", "--model.text_model=transformer_pp_debug"]
    run("fit", *small(tmp_path), *plain, "--trainer.max_steps=1", "--model.cross_compose=false")
    asked = [argument for argument in small(tmp_path) if not argument.startswith(("--trainer.max", "--trainer.grad"))]
    asked = ["validate", *asked, *plain, "--model.cross_compose=false", f"--checkpoint={tmp_path / 't/version_0'}"]
    run(*asked)
    image = "--model.model_kwargs.num_heads=2"
    assert "the checkpoint has 4 heads in blocks.0.attn; the model has 2" in mistake(capsys, run, *asked, image)
    scaled = "--model.model_kwargs.pretrained_cfg_overlay={mean: [0.1, 0.2, 0.3]}"
    assert "the checkpoint normalizes images with mean [0.5, 0.5, 0.5]" in mistake(capsys, run, *asked, scaled)
    text = "--model.text_overrides.num_heads=2"
    assert "a different text tower: num_heads=4, here 2" in mistake(capsys, run, *asked, text)
    assert "batch_size=1 on one rank" in mistake(capsys, run, *asked, "--data.batch_size=1")


@pytest.mark.long
@pytest.mark.parametrize("losses", ["--model.caption_weight=0", "--model.contrastive=null"])
def test_two_ranks_with_one_loss_and_one_validation_sample_match_one_rank(tmp_path, losses):
    """DDP requires a gradient of every parameter, and a rank without validation samples must reduce metrics."""
    run("fit", *small(tmp_path / "one"), losses, "--data.val_samples=1", "--trainer.max_steps=1", EXACT)
    two = ["--trainer.strategy=ddp", "--trainer.devices=2", "--data.batch_size=2", "--trainer.max_steps=1", EXACT]
    finished = spawn("fit", *small(tmp_path / "two"), losses, "--data.val_samples=1", *two)
    assert finished.returncode == 0, finished.stderr[-2000:]
    one, two = validated(tmp_path / "one"), validated(tmp_path / "two")
    assert one.keys() == two.keys()
    for curve in {"caption_loss", "image_to_text"} & one.keys():
        assert two[curve] == pytest.approx(one[curve], rel=1e-6)


def test_image_tower_may_have_pooled_output_wider_than_patches(tmp_path):
    """The head of MobileNetV3 widens the pooled features."""
    tower = ["--model.model=mobilenetv3_small_050", "--model.model_kwargs={}", "--trainer.max_steps=1"]
    run("fit", *small(tmp_path), *tower)
    shapes = {name: list(weight.shape) for name, weight in weights(tmp_path / "t/version_0").items()}
    assert shapes["model.image_proj.weight"] == [16, 1024] and shapes["model.text.blocks.1.cross.kv.weight"][1] == 288


@pytest.mark.long
def test_compare_runs_scenes_experiment(tmp_path):
    """The runs have no composition, full composition, and full composition with hidden images."""
    tiny = ["--trainer.accelerator=cpu", "--data.val_samples=8", "--data.batch_size=8"]
    experiment = yaml.safe_load((ROOT / "configs/experiments/scenes.yaml").read_text())
    kept = {name: experiment["models"][name] for name in ("plain", "all", "all, images hidden")}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(experiment | {"models": kept, "seeds": [0]}))
    asked = [f"--experiment={tmp_path / 'a.yaml'}", f"--out={tmp_path / 'out'}"]
    finished = spawn("compare", *asked, "--", *tiny, "--trainer.max_steps=2", "--trainer.val_check_interval=2")
    assert finished.returncode == 0, finished.stderr[-2000:]
    runs = json.loads((tmp_path / "out/results.json").read_text())["runs"]
    assert len(runs) == 3 and all(len(run["curves"]["unseen/exact_match"]) == 1 for run in runs.values())
    parameters = {key: run["parameters"] for key, run in runs.items()}
    assert parameters["all | seed 0"] == parameters["all, images hidden | seed 0"] > parameters["plain | seed 0"]


@pytest.mark.parametrize(
    ("arguments", "layers", "curves"),
    [
        ([], 1, {"loss", "contrastive_loss", "caption_loss", "image_to_text", "text_to_image"}),
        (["--model.contrastive=null"], 2, {"loss", "caption_loss"}),
        (["--model.caption_weight=0"], 0, {"loss", "contrastive_loss", "image_to_text", "text_to_image"}),
    ],
)
def test_single_and_combined_losses_log_expected_curves(tmp_path, arguments, layers, curves):
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
        (["--data.batch_size=1"], "data.batch_size=1 on one rank: a contrastive loss requires at least two pairs"),
        (
            ["--model.contrastive=null", "--model.caption_weight=0"],
            "contrastive=null and caption_weight=0: expected at least one loss",
        ),
        (["--model.contrastive_weight=0"], "contrastive_weight=0 leaves the embeddings untrained"),
        (["--model.cross_layers=0"], "cross_layers=0 with caption_weight=1.0"),
        (["--model.cross_layers=2"], "cross_layers=2: texts are embedded before the cross-attention layers"),
        (["--model.text_overrides.num_layers=1"], "num_layers=1; both losses require at least two"),
        (["--data.horizontal_flip=true"], "horizontal_flip=True, min_crop_area=1.0: not supported for scenes"),
        (["--data.crop_fraction=0.9"], "crop_fraction=0.9: not supported for scenes"),
        (["--data.min_crop_area=0.5"], "min_crop_area=0.5: not supported for scenes"),
        (
            ["--model.model=dla34", "--model.model_kwargs={}", "--model.recompute=block"],
            "='block' is not supported by DLA",
        ),
        (["--model.cross_layers=3"], "cross_layers=3 must be from 0 to num_layers=2"),
        (["--model.text_overrides.context_dim=8"], "text_overrides must not contain ['context_dim']"),
        (["--model.text_overrides.is_causal=false"], "text_overrides.is_causal=false"),
        (["--model.text_model=gpt"], "model 'gpt' is unknown"),
        (["--model.model=vit"], "model 'vit' is unknown to timm"),
        (["--data.train=shards:none.tar"], "data.tokenizer is required for captions of 'shards:none.tar'"),
        (["--data.train=pictures", "--data.tokenizer=bytes"], "data set 'pictures' is unknown; expected scenes"),
        (["--data.train=scenes:test"], "scenes:test is unknown; expected scenes:train, scenes:val, scenes:unseen"),
        (["--data.val_samples=null"], "data.val=scenes is endless; data.val_samples is required"),
        (["--data.context_length=2"], "context_length=2 must be at least 3"),
    ],
)
def test_invalid_arguments_are_rejected(tmp_path, capsys, arguments, message):
    assert message in mistake(capsys, run, "fit", *small(tmp_path), *arguments)
