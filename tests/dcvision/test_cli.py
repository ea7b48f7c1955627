"""Command line: training, evaluation, export, strategies, configurations and error messages."""

import csv
import json
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dcmha import DCAttention
from dctrain.checkpointing.checkpoint import find_checkpoint, load_checkpoint, newest_checkpoint
from dcvision.factory import build_model
from tests.dctrain.commands import ROOT, record
from tests.dctrain.recorder import read

from .commands import run, small, spawn


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folder of a short run on the digits with an exponential moving average of the weights."""
    root = tmp_path_factory.mktemp("trained")
    run(*trained_arguments("fit", root))
    return root / "t" / "version_0"


def trained_arguments(command: str, root: Path) -> list[str]:
    return [
        *(command, "--config", str(ROOT / "configs/vision/digits.yaml"), "--name=t", "--model.ema_decay=0.95"),
        *("--trainer.max_epochs=4", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={root}"),
        *("--trainer.enable_progress_bar=false", "--model.warmup_steps=10", "--trainer.log_every_n_steps=5"),
    ]


def scalars(folder: Path) -> dict[str, list]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}


def test_fit_reduces_loss_and_writes_logs_and_checkpoints(trained):
    logged = scalars(trained)
    expected = {"train/loss", "train/lr", "train/grad_norm", "train/images_per_second", "train/mfu"}
    assert expected | {"val/loss", "val/top1", "val/top5"} <= logged.keys()
    assert logged["train/loss"][-1].value < 0.8 * logged["train/loss"][0].value
    assert 0.2 < logged["val/top1"][-1].value <= logged["val/top5"][-1].value <= 1
    assert all(0 < event.value < 1.5 for event in logged["train/mfu"])
    assert len(logged["val/top1"]) == 4
    names = sorted(path.name.split("-")[0] for path in (trained / "checkpoints").iterdir())
    assert names == ["best", "last"]
    keys = load_checkpoint(newest_checkpoint(trained))["state_dict"].keys()
    assert not any("_orig_mod" in key for key in keys)
    assert (trained / "config.yaml").exists()
    (where,) = json.loads((trained / "environment.json").read_text())
    assert where["torch"] == torch.__version__ and where["devices"] == 1 and where["device"]


def test_validate_and_predict_match_accuracy_reported_by_training(trained, tmp_path, capsys):
    best = str(next((trained / "checkpoints").glob("best-*")))
    reported = float(best.rsplit("top1=", 1)[1].removesuffix(".ckpt"))
    config = ["--config", str(trained / "config.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    run("validate", *config, f"--checkpoint={best}", "--data.train=folder:not_needed_here")
    assert not list(tmp_path.iterdir())  # the output is in the folder of the evaluated run
    top1 = scalars(trained / "validate")["val/top1"][-1].value
    assert abs(top1 - reported) < 1e-4
    capsys.readouterr()
    for out, path in (
        ([], trained / "predict/predictions.csv"),
        ([f"--out={tmp_path}/new/p.csv"], tmp_path / "new/p.csv"),
    ):
        run("predict", *config, f"--checkpoint={best}", *out)
        assert str(path) == capsys.readouterr().out.split("predictions ")[-1].strip()
    rows = list(csv.DictReader(path.open()))
    assert len(rows) == 360 and len({row["name"] for row in rows}) == 360
    from dcvision.data.sources import open_source

    source = open_source("digits", is_train=False)
    truth = {source.name(i): int(label) for i, label in enumerate(source.labels())}
    correct = sum(truth[row["name"]] == int(row["class"]) for row in rows) / 360
    assert abs(correct - reported) < 1e-4


def test_exported_model_loads_in_timm(trained, tmp_path, capsys):
    checkpoint = newest_checkpoint(trained)
    for folder, prefix, options in (("average", "ema.module.", []), ("raw", "model.", ["--raw=true"])):
        run("export", f"--checkpoint={checkpoint}", f"--out={tmp_path / folder}", *options)
        model = timm.create_model(f"local-dir:{tmp_path / folder}", pretrained=True)
        state = load_checkpoint(checkpoint)["state_dict"]
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[prefix + key]), key
        assert model(torch.randn(1, 3, 8, 8)).shape == (1, 10)
    with pytest.raises(SystemExit):
        run("export", f"--checkpoint={checkpoint}", f"--out={tmp_path / 'raw'}")
    assert "contains an exported model; nothing was overwritten" in capsys.readouterr().err


@pytest.mark.slow
def test_swapped_model_is_trained_exported_and_visualized(shards, tmp_path):
    model = ["--model.model=vit_tiny_patch16_224", "--model.model_kwargs={depth: 2, patch_size: 4}"]
    run("fit", *small(shards, tmp_path), *model, "--model.swap={rank: 1, layers: [-1]}", "--trainer.max_steps=3")
    checkpoint = find_checkpoint(str(tmp_path / "t/version_0"))
    run("export", f"--checkpoint={checkpoint}", f"--out={tmp_path / 'exported'}")
    for classes in (10, 3):
        model = timm.create_model(f"local-dir:{tmp_path / 'exported'}", pretrained=True, num_classes=classes)
        assert [isinstance(block.attn, DCAttention) for block in model.blocks] == [False, True]
        assert model.blocks[1].attn.options.rank == 1 and model(torch.randn(1, 3, 8, 8)).shape == (1, classes)
        state = load_checkpoint(checkpoint)["state_dict"]
        for key, value in model.state_dict().items():
            assert key.startswith("head.") and classes == 3 or torch.equal(value, state[f"model.{key}"]), key
    again = [f"--model.model=local-dir:{tmp_path / 'exported'}", "--model.model_kwargs={pretrained: true}"]
    run("fit", *small(shards, tmp_path), *again, "--trainer.max_steps=1", "--model.lr=0", "--model.warmup_steps=0")
    tuned = load_checkpoint(find_checkpoint(str(tmp_path / "t/version_1")))["state_dict"]
    assert all(torch.equal(value, state[key]) for key, value in tuned.items() if key.startswith("model."))
    Image.new("RGB", (9, 9)).save(tmp_path / "image.png")
    run("visualize", f"--checkpoint={checkpoint}", f"--image={tmp_path}/image.png", f"--out={tmp_path}/pictures")
    assert (tmp_path / "pictures/blocks.1.attn.png").exists()


@pytest.mark.slow
def test_swapped_relative_position_model_is_visualized_and_explained(shards, tmp_path):
    """The composed layers of this model are not instances of `DCAttention`."""
    model = ["--model.model=vit_relpos_small_patch16_224", "--model.model_kwargs={depth: 2, patch_size: 4}"]
    run("fit", *small(shards, tmp_path), *model, "--model.swap={rank: 1}", "--trainer.max_steps=1")
    run_folder = tmp_path / "t/version_0"
    Image.new("RGB", (9, 9)).save(tmp_path / "image.png")
    of = [f"--checkpoint={run_folder}", f"--image={tmp_path}/image.png"]
    run("visualize", *of, f"--out={tmp_path}/pictures")
    assert (tmp_path / "pictures/blocks.1.attn.png").exists()
    run("explain", "report", *of, f"--out={tmp_path}/page", "--steps=2")
    page = (tmp_path / "page/index.html").read_text()
    assert "blocks.1.attn" in page and "Not recorded" not in page and "no composition" not in page


def test_swapped_attention_pooling_is_trained(shards, tmp_path):
    model = ["--model.model=vit_base_patch16_siglip_224", "--model.model_kwargs={depth: 1, patch_size: 4}"]
    run("fit", *small(shards, tmp_path), *model, "--model.swap={pooling: true}", "--trainer.max_steps=3")
    state = load_checkpoint(find_checkpoint(str(tmp_path / "t/version_0")))["state_dict"]
    assert state["model.attn_pool.compose.key.gate"].any()


def test_model_name_may_include_timm_tag():
    model = build_model("vit_tiny_patch16_224.augreg_in21k", 3, 32, {"depth": 1})
    assert model.pretrained_cfg["tag"] == "augreg_in21k" and model(torch.zeros(1, 3, 32, 32)).shape == (1, 3)


def test_bf16_true_precision_trains_bfloat16_weights(shards, tmp_path):
    run("fit", *small(shards, tmp_path), "--trainer.max_steps=3", "--trainer.precision=bf16-true")
    state = load_checkpoint(find_checkpoint(str(tmp_path / "t/version_0")))["state_dict"]
    assert state["model.blocks.0.attn.compose.hidden"].dtype == torch.bfloat16


def test_run_resumes_after_its_folder_is_moved(shards, tmp_path, monkeypatch, capsys):
    """The resumed run finds the best checkpoint and keeps the previous entries of `environment.json`."""
    arguments = [argument for argument in small(shards, tmp_path) if "max_epochs" not in argument]
    run("fit", *arguments, "--trainer.max_epochs=2")
    (tmp_path / "t").rename(tmp_path / "moved")
    run_folder = tmp_path / "moved/version_0"
    best = list((run_folder / "checkpoints").glob("best-*"))
    monkeypatch.chdir(tmp_path)
    run("fit", *arguments, "--trainer.max_epochs=3", "--resume=moved/version_0", "--model.lr=0.0")
    assert list((run_folder / "checkpoints").glob("best-*")) == best and best[0].name in capsys.readouterr().out
    assert len(json.loads((run_folder / "environment.json").read_text())) == 2
    best[0].unlink()
    (run_folder / "environment.json").write_text("")
    run("fit", *arguments, "--trainer.max_epochs=4", "--resume=moved/version_0", "--model.lr=0.0")
    (again,) = (run_folder / "checkpoints").glob("best-*")
    assert "epoch=3" in again.name and again.name in capsys.readouterr().out
    assert len(json.loads((run_folder / "environment.json").read_text())) == 1


@pytest.mark.parametrize("limit", ["6", "0.6"])
def test_epochs_and_schedule_respect_limit_train_batches(shards, tmp_path, limit):
    run("fit", *small(shards, tmp_path), f"--trainer.limit_train_batches={limit}", *record(tmp_path / "a"))
    batches = read(tmp_path / "a")
    assert set(batches) == set(range(18))
    assert batches[17]["lr"] < 0.05 * batches[2]["lr"]
    for epoch in range(3):
        names = [name for batch in range(6 * epoch, 6 * epoch + 6) for name in batches[batch]["samples"]]
        assert len(set(names)) == 24


@pytest.mark.long
def test_compiled_training_saves_keys_without_compile_prefix(shards, tmp_path):
    extra = [
        "--model.compile=true",
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=2",
        "--model.warmup_steps=1",
    ]
    run("fit", *small(shards, tmp_path), *extra)
    keys = load_checkpoint(newest_checkpoint(tmp_path))["state_dict"].keys()
    assert "model.blocks.0.attn.compose.hidden" in keys
    assert not any("_orig_mod" in key for key in keys)


@pytest.mark.parametrize(
    "extra",
    [
        ["--trainer.precision=bf16-mixed"],
        ["--trainer.accumulate_grad_batches=3"],
        ["--model.decay_all=true", "--model.label_smoothing=0.1", "--data.randaugment_ops=2"],
        ["--model.model=mhavit_digits_patch2_8"],
        ["--trainer.fast_dev_run=true"],
    ],
    ids=lambda extra: extra[0],
)
def test_training_runs_with_option_variants(shards, tmp_path, extra):
    run("fit", *small(shards, tmp_path), "--trainer.max_epochs=1", *extra)
    if "fast_dev_run" in extra[0]:
        assert not list(tmp_path.rglob("*.ckpt"))
    else:
        last = load_checkpoint(next(tmp_path.rglob("last-*.ckpt")))
        assert last["global_step"] == (4 if "accumulate" in extra[0] else 10)
        assert all(value.isfinite().all() for value in last["state_dict"].values())


FSDP = ["--trainer.strategy=fsdp2"]


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(["--trainer.strategy=ddp"], id="ddp", marks=pytest.mark.long),
        pytest.param(["--trainer.strategy=ddp", "--model.ema_decay=0.9"], id="ddp, averaged", marks=pytest.mark.slow),
        pytest.param(FSDP, id="fsdp2", marks=pytest.mark.long),  # the slow tests of dclm cover FSDP2
    ],
)
def test_two_processes_match_one_process(shards, tmp_path, strategy):
    """Validation on shards of unequal size and training match: two ranks with two images each, one rank with four."""
    common = ["--trainer.max_epochs=2", "--model.mixup_alpha=0", "--model.model_kwargs={depth: 2}"]
    common += ["--data.val=shards:" + shards.replace("{0..4}", "{0..1}") + "::" + shards.replace("{0..4}", "3")]
    common += [option for option in strategy if option.startswith("--model")]
    run("fit", *small(shards, tmp_path / "one"), *common, "--data.batch_size=4")
    two = spawn(
        "fit", *small(shards, tmp_path / "two"), *common, *strategy, "--trainer.devices=2", "--data.batch_size=2"
    )
    assert two.returncode == 0, two.stderr
    logs = [scalars(tmp_path / name / "t/version_0") for name in ("one", "two")]
    for tag in ("val/loss", "val/top1", "val/top5", "train/grad_norm"):
        values = [[event.value for event in log[tag]] for log in logs]
        assert values[0] == pytest.approx(values[1], rel=1e-4), tag
    states = [load_checkpoint(newest_checkpoint(tmp_path / name))["state_dict"] for name in ("one", "two")]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, rtol=1e-3, atol=1e-4)


@pytest.mark.long
def test_fabric_launches_several_processes(shards, tmp_path):
    program = str(Path(sys.executable).with_name("fabric"))
    fabric = (program, "run", "--accelerator=cpu", "--devices=2", "dcvision/__main__.py")
    arguments = [*small(shards, tmp_path), "--trainer.max_epochs=1", "--trainer.strategy=ddp", "--trainer.devices=2"]
    result = spawn("fit", *arguments, "--data.batch_size=2", prefix=fabric)
    assert result.returncode == 0, result.stderr
    state = load_checkpoint(newest_checkpoint(tmp_path))["ImageDataModule"]
    assert state["global_batch"] == 4


def test_weight_decay_excludes_gates_norms_and_biases_unless_decay_all():
    from dcvision import ImageClassifier

    for decay_all, undecayed in (
        (True, set()),
        (False, {"compose.gate", "bias", "norm1.weight", "norm2.weight", "norm.weight"}),
    ):
        module = ImageClassifier(decay_all=decay_all)
        names = {id(p): name for name, p in module.model.named_parameters()}
        groups = {group["weight_decay"]: group["params"] for group in module._parameter_groups()}
        free = {names[id(p)] for p in groups.get(0.0, [])}
        assert all(any(name.endswith(end) for end in undecayed) for name in free)
        assert sum(len(group) for group in groups.values()) == len(names)
        assert any(name.endswith("compose.gate") for name in free) != decay_all


def test_schedule_warms_up_linearly_and_decays_to_minimum():
    from dctrain.lr_schedule import warmup_cosine

    factors = [warmup_cosine(step, 10, 110, 0.1) for step in range(111)]
    assert factors[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert factors[10] == 1 and factors[60] == pytest.approx(0.55) and factors[110] == pytest.approx(0.1)
    assert all(a >= b for a, b in zip(factors[10:], factors[11:], strict=False))


def mistake(capsys, *args: str) -> str:
    """Run a command that fails, check that it prints no stack trace or usage, and return the error output."""
    with pytest.raises(SystemExit) as exit_info:
        run(*args)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error and "usage:" not in error
    return error


def test_invalid_arguments_print_error_message(shards, tmp_path, capsys):
    arguments = small(shards, tmp_path)
    error = mistake(capsys, "fit", *arguments, "--trainer.max_epoch=3")
    assert error.endswith("error: unrecognized arguments: --trainer.max_epoch=3\n")
    error = mistake(capsys, "fitt")
    assert "'fitt' is not a subcommand of dcvision; expected fit, validate, test, predict, plan, export" in error
    error = mistake(capsys, "export", "--checkpoint=a", "--out=b", "--folder=x")
    assert error == "error: unrecognized arguments: --folder=x\n"
    typo = tmp_path / "typo.yaml"
    typo.write_text("trainer: {max_epoch: 3}")
    error = mistake(capsys, "fit", *arguments, f"--config={typo}")
    assert "'fit' does not accept option 'trainer.max_epoch'" in error
    error = mistake(capsys, "fit", *arguments, "--model.model=dcvit_digit_patch2_8")
    assert "error: model 'dcvit_digit_patch2_8' is unknown to timm; close names: dcvit_digits_patch2_8" in error
    error = mistake(capsys, "fit", *arguments, "--model.model_kwargs={num_heads: 5}")
    assert "dim=64 must be divisible by num_heads=5" in error
    error = mistake(capsys, "fit", *arguments, "--model.model_kwargs={num_groups: 3}")
    assert "num_groups=3 must be a positive divisor of num_heads=4" in error
    error = mistake(capsys, "fit", *arguments, "--model.model_kwargs={rnak: 1}")
    assert "cannot be built with" in error and "rnak" in error
    error = mistake(capsys, "fit", *arguments, f"--data.train=shards:{tmp_path}/none-{{0..3}}.tar")
    assert "error: 4 of 4 shards are missing" in error
    error = mistake(capsys, "fit", *arguments, "--data.num_classes=4")
    assert "is out of range; expected 0 to 3" in error
    error = mistake(capsys, "fit", *arguments, f"--resume={tmp_path}/nothing")
    assert "error: no checkpoint" in error
    error = mistake(capsys, "validate", *arguments)
    assert "--checkpoint: expected a checkpoint (NAME.ckpt)" in error
    error = mistake(capsys, "validate", *arguments, "--checkpoint=nofile.ckpt")
    assert "no checkpoint: nofile.ckpt does not exist" in error
    for option, message in (
        ("--model.model=dcmha_swapped", "is for loading only; to train, set the base"),
        ("--model.swap.rank=2", "its layers are DCAttention"),
        ("--model.model=local-dir:nowhere", "model 'local-dir:nowhere' cannot be built"),
        ("--model.swap.model=1", "multiple values for argument 'model'"),
        ("--model.model_kwargs.features_only=true", "features_only=True has no classifier"),
        ("--model.lr=-1", "lr=-1.0 must be in [0, 1e+06]"),
        ("--model.betas=[0.9,1.5]", "betas=[0.9, 1.5]"),
        ("--model.ema_decay=2", "ema_decay=2.0 must be in (0, 1)"),
        ("--data.randaugment_magnitude=50", "randaugment_magnitude=50 in [0, 30]"),
        ("--data.num_classes=1", "num_classes=1 must be at least 2"),
        ("--checkpoint_every_n_steps=0", "checkpoint_every_n_steps=0 must be at least 1"),
        ("--data.train=shards:", "data set 'shards:' is unknown; expected"),
    ):
        assert message in mistake(capsys, "fit", *arguments, option), option
    other, out = tmp_path / "other.ckpt", [f"--out={tmp_path / 'out'}"]
    torch.save({"hyper_parameters": {"model": "dcformer_pp_405m"}, "state_dict": {}}, other)
    assert "it has no image model" in mistake(capsys, "export", f"--checkpoint={other}", *out)
    error = mistake(capsys, "export", f"--checkpoint={tmp_path}/no.ckpt", *out)
    assert "does not exist" in error


def test_checkpoint_of_different_architecture_is_rejected(trained, tmp_path, capsys):
    checkpoint = newest_checkpoint(trained)
    before = checkpoint.read_bytes()
    arguments = [*trained_arguments("fit", tmp_path), "--model.model=mhavit_digits_patch2_8", f"--resume={checkpoint}"]
    error = mistake(capsys, *arguments)
    assert "it was trained with model='dcvit_digits_patch2_8', here 'mhavit_digits_patch2_8'" in error
    arguments = [
        *trained_arguments("validate", tmp_path),
        "--model.model_kwargs={depth: 3}",
        f"--checkpoint={checkpoint}",
    ]
    error = mistake(capsys, *arguments)
    assert "the checkpoint has a different architecture" in error and ", here " in error
    assert checkpoint.read_bytes() == before


def test_too_many_unreadable_images_stop_training(tmp_path, capsys):
    from tests.conftest import numbered_samples, write_shard

    samples = numbered_samples(40)
    for sample in samples[::4]:
        sample["png"] = sample["png"][:30]
    path = write_shard(tmp_path / "a.tar", samples)
    error = mistake(capsys, "fit", *small(str(path), tmp_path), "--trainer.num_sanity_val_steps=0")
    assert "images could not be read; at most 5 of this set are allowed (data.max_bad_images=5); one of" in error


def test_new_run_does_not_modify_existing_run(shards, tmp_path):
    short = [*small(shards, tmp_path), "--trainer.max_epochs=1"]
    run("fit", *short)
    first = {path: path.read_bytes() for path in (tmp_path / "t/version_0").rglob("*") if path.is_file()}
    run("fit", *short)
    assert (tmp_path / "t/version_1/config.yaml").exists()
    assert all(path.read_bytes() == content for path, content in first.items())
