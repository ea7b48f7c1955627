"""Invalid command-line arguments. Each row has the arguments and an expected part of the error line."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.io import savemat

from tests.conftest import numbered_samples, write_shard
from tests.dclm.commands import run as run_dclm
from tests.dclm.commands import small as small_lm
from tests.dcvision.commands import run, small

from .fault_injection import image_folder, mistake

FIT_IMAGES = [
    ("--trainer.log_every_n_steps=0", "trainer.log_every_n_steps=0 must be at least 1"),
    ("--trainer.log_every_n_steps=-1", "trainer.log_every_n_steps=-1 must be at least 1"),
    ("--trainer.accumulate_grad_batches=0", "trainer.accumulate_grad_batches=0 must be at least 1"),
    ("--trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1"),
    ("--trainer.gradient_clip_val=.nan", "trainer.gradient_clip_val=nan must be at least 0"),
    ("--trainer.val_check_interval=0", "trainer.val_check_interval=0 must be a positive number"),
    ("--trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0 must be at least 1"),
    ("--trainer.max_steps=0", "trainer.max_steps=0 must be at least 1, or -1"),
    ("--trainer.max_epochs=0", "the run has no limit, which the schedule requires"),
    ("--trainer.devices=0", "trainer: "),
    ("--trainer.strategy=nope", "trainer: You selected an invalid strategy name"),
    ("--trainer.default_root_dir=/etc/passwd", "Not a directory: /etc/passwd"),
    ("--trainer.default_root_dir=/proc/nowhere", "No such file or directory: /proc/nowhere"),
    ("--trainer.default_root_dir=", "trainer.default_root_dir='': expected a name or a path"),
    ("--trainer.limit_train_batches=0", "trainer.limit_train_batches=0 leaves no data to train on"),
    ("--data.train=", "data.train='': expected a name or a path"),
    ("--resume=", "resume='': expected a name or a path"),
    ("--name=", "name='' must be the name of a folder below trainer.default_root_dir"),
    ("--name=../other", "name='../other' must be the name of a folder"),
    ("--name=/elsewhere", "name='/elsewhere' must be the name of a folder"),
    ("--seed_everything=-5", "seed_everything: -5 is not in bounds"),
    ("--seed_everything=99999999999999", "seed_everything: 99999999999999 is not in bounds"),
    ("--data.seed=-1", "seed=-1 must be in [0, 2^32)"),
    ("--data.seed=99999999999999999999", "must be in [0, 2^32)"),
    ("--data.train=shards:/x/a-{0..", "Unbalanced braces"),
    ("--data.image_size=1", "image_size=1 must be a multiple of the model's patch size, 2"),
    ("--data.max_bad_images=1.5", "max_bad_images=1.5 must be a number of images, or a fraction in [0, 1)"),
    ("--data.max_pixels=0", "max_pixels=0 must be in [1, 178956970]"),
    ("--data.max_pixels=400000000", "max_pixels=400000000 must be in [1, 178956970]"),
    ("--data.fields={picture: jpg}", "data.fields: "),
    ("--data.fields={image: ''}", "fields.image='' must name a field"),
    ("--model.warmup_steps=-5", "warmup_steps=-5 must not be negative"),
    ("--model.lr=.nan", "lr=nan must be in [0, 1e+06]"),
    ("--model.weight_decay=.inf", "weight_decay=inf must be in [0, 1e+06]"),
    ("--model.mixup_alpha=.inf", "mixup_alpha=inf finite and not negative"),
    ("--model.model_kwargs={impl: triton}", "model: impl='triton' cannot run: it "),
    ("--model.model_kwargs={window_size: 2.5}", "window_size=2.5 must be an integer"),
    (
        "--model.model_kwargs={class_token: true}",
        "class_token=True: dcvit_* and mhavit_* models have class_token=False",
    ),
    ("--resume=nowhere", "no checkpoint: nowhere does not exist"),
]
FIT_TEXT = [
    ("--data.tokens=/etc", "/etc is not a prepared corpus"),
    ("--data.context_length=0", "context_length=0"),
    ("--data.context_length=100000", "a sequence needs 100000 and one more"),
    ("--data.val_tokens=0", "val_tokens=0 must be at least 1"),
    ("--model.overrides={impl: triton}", "model: impl='triton' cannot run: it "),
    ("--model.overrides={windows: [2.5]}", "windows=[2.5] must be a list of numbers and nulls"),
    ("--model.warmup_fraction=.nan", "warmup_fraction=nan must be in [0, 1)"),
    ("--model.lr=-1", "lr=-1.0 must be in [0, 1e+06]"),
]


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch):
    """Make the fused kernels unavailable on the CPU, as on a user's machine."""
    monkeypatch.setattr("dcmha.dispatch._what_is_missing", lambda device: f"it needs an NVIDIA GPU, got q on {device}")


@pytest.mark.parametrize(("wrong", "message"), FIT_IMAGES, ids=[wrong for wrong, _ in FIT_IMAGES])
def test_fit_of_images_rejects_invalid_argument(shards, tmp_path, capsys, wrong, message):
    assert message in mistake(capsys, run, "fit", *small(shards, tmp_path / "root"), wrong)
    assert not list((tmp_path / "root").rglob("*"))


@pytest.mark.parametrize(("wrong", "message"), FIT_TEXT, ids=[wrong for wrong, _ in FIT_TEXT])
def test_fit_of_text_rejects_invalid_argument(corpus, tmp_path, capsys, wrong, message):
    assert message in mistake(capsys, run_dclm, "fit", *small_lm(corpus, tmp_path / "root"), wrong)
    assert not list((tmp_path / "root").rglob("*"))


def test_text_sample_rejects_empty_prompt(corpus, tmp_path, capsys):
    sampling = ["--trainer.callbacks+=dclm.callbacks.TextSample", "--trainer.callbacks.prompt="]
    error = mistake(capsys, run_dclm, "fit", *small_lm(corpus, tmp_path), *sampling)
    assert error == "error: TextSample's prompt='': expected a text."


def test_generate_rejects_invalid_arguments_and_nan_logits(trained_lm, tmp_path, capsys):
    asked = ["generate", f"--checkpoint={trained_lm}", "--temperature=1", "--seed=0"]
    for wrong, message in (
        (["--prompt=", "--max_new_tokens=3"], "prompt 0 has shape [0]; expected at least one token id"),
        (["--prompt=a\udcff"], "a prompt: "),
        (["--prompt=a", "--max_new_tokens=2000000000"], "no memory for a cache of 2,000,000,001 tokens"),
        (["--prompt=a", "--max_new_tokens=-1"], "max_new_tokens=-1"),
        (["--prompt=a", "--temperature=-1"], "temperature=-1.0"),
        (["--prompt=a", "--device=cuda:99"], "device='cuda:99' cannot be used: "),
    ):
        assert message in mistake(capsys, run_dclm, *asked, *wrong), wrong
    content = torch.load(next((trained_lm / "checkpoints").glob("last*")), weights_only=True)
    content["state_dict"]["model.output.weight"][:] = torch.nan
    torch.save(content, tmp_path / "nan.ckpt")
    for temperature in (0, 1):
        wrong = ["generate", f"--checkpoint={tmp_path}/nan.ckpt", "--prompt=a", f"--temperature={temperature}"]
        assert "the logits of new token 0 have NaN" in mistake(capsys, run_dclm, *wrong)


def test_tokens_rejects_unsupported_eos_and_damaged_records(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text")
    asked = ["tokens", f"--inputs={tmp_path}/a.txt"]
    error = mistake(capsys, run_dclm, *asked, f"--out={tmp_path}/out", "--eos=<end>")
    assert "eos='<end>' is not supported with bytes" in error
    run_dclm(*asked, f"--out={tmp_path}/out", "--val_fraction=0")
    assert "warning: there are no validation tokens" in capsys.readouterr().out
    asked.append("--val_fraction=0")
    for name in ("plan.json", "manifest.json"):
        before = (tmp_path / "out" / name).read_text()
        for content in ("{", "[]"):
            (tmp_path / "out" / name).write_text(content)
            assert f"{name} is damaged" in mistake(capsys, run_dclm, *asked, f"--out={tmp_path}/out")
        (tmp_path / "out" / name).write_text(before)


def test_verify_rejects_changed_and_missing_files(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("some text")
    run_dclm("tokens", f"--inputs={tmp_path}/a.txt", f"--out={tmp_path}/corpus", "--val_fraction=0")
    run_dclm("verify", f"--tokens={tmp_path}/corpus")
    assert "all 1 files match their checksums" in capsys.readouterr().out
    (path,) = (tmp_path / "corpus").glob("*.bin")
    path.write_bytes(path.read_bytes()[::-1])
    assert "train-0000.bin has changed" in mistake(capsys, run_dclm, "verify", f"--tokens={tmp_path}/corpus")
    path.unlink()
    assert "train-0000.bin is missing" in mistake(capsys, run_dclm, "verify", f"--tokens={tmp_path}/corpus")
    image_folder(tmp_path / "images")
    out = [f"--out={tmp_path}/shards", "--num_shards=2"]
    run("shards", f"--folder={tmp_path}/images", *out)
    run("verify", f"--folder={tmp_path}/shards")
    shard = tmp_path / "shards/train-0001.tar"
    content = bytearray(shard.read_bytes())
    content[600] ^= 1
    shard.write_bytes(content)
    error = mistake(capsys, run, "verify", f"--folder={tmp_path}/shards")
    assert "1 of 2 files are missing or changed: train-0001.tar has changed" in error
    assert "has no *-manifest.json" in mistake(capsys, run, "verify", f"--folder={tmp_path}/images")


def validation_tar(tmp_path: Path) -> list[str]:
    """Write a validation set in the official layout: a tar, ground truth and class names. Return its arguments."""
    write_shard(
        tmp_path / "val.tar", [{"__key__": f"v{i}", "png": s["png"]} for i, s in enumerate(numbered_samples(2))]
    )
    (tmp_path / "classes.txt").write_text("a\nb\n")
    (tmp_path / "labels.txt").write_text("a\nb\n")
    paths = ("validation_tar=val.tar", "labels=labels.txt", "classes=classes.txt")
    return [f"--{path.replace('=', f'={tmp_path}/')}" for path in paths]


def test_shards_rejects_invalid_ground_truth(tmp_path, capsys):
    asked = ["shards", *validation_tar(tmp_path), f"--out={tmp_path}/out", "--num_shards=1"]
    run(*asked, "--prefix=val")
    labels, meta = tmp_path / "labels.txt", tmp_path / "meta.mat"
    for content, message in (
        ("a\n", "has 1 lines, but the tar has 2 images"),
        ("a\nc\n", "1 classes of"),
        ("1\n2\n", "--devkit_meta=meta.mat is required"),
        ("ImageId,PredictionString\nv0,a 1 2 3 4\n", "has no line for 1 images, the first is v1"),
        ("ImageId,Other\nv0,a\nv1,b\n", "labels.txt: line 2 has no PredictionString"),
        ("ImageId,PredictionString\nv0,\nv1,b\n", "labels.txt: line 2 has no PredictionString"),
    ):
        labels.write_text(content)
        assert message in mistake(capsys, run, *asked, "--prefix=x"), content
    labels.write_bytes(b"\xff\xfe\x00")
    assert "labels.txt" in mistake(capsys, run, *asked, "--prefix=x")
    labels.write_text("1\n7\n")
    meta.write_text("no matrix")
    assert "meta.mat" in mistake(capsys, run, *asked, "--prefix=x", f"--devkit_meta={meta}")
    synsets = np.array([(1, "a"), (2, "b")], dtype=[("ILSVRC2012_ID", "O"), ("WNID", "O")])
    savemat(meta, {"synsets": synsets})
    assert "class number 7 is not in" in mistake(capsys, run, *asked, "--prefix=x", f"--devkit_meta={meta}")


def test_shards_rejects_invalid_arguments_and_damaged_plan(tmp_path, capsys):
    image_folder(tmp_path / "images")
    asked = ["shards", f"--folder={tmp_path}/images", "--num_shards=2"]
    for wrong, message in (
        ([f"--out={tmp_path}/out", "--prefix=a/b"], "prefix='a/b' must be the start of a file's name"),
        ([f"--out={tmp_path}/out", "--prefix="], "prefix='' must be the start of a file's name"),
        ([f"--out={tmp_path}/images/a/0.png"], "the folder"),
        ([f"--out={tmp_path}/out", "--seed=-1"], "seed=-1 must be in [0, 2^32)"),
        ([f"--out={tmp_path}/out", "--num_shards=5"], "num_shards=5 must be between 1 and the number of images, 4"),
    ):
        assert message in mistake(capsys, run, *asked, *wrong), wrong
    run(*asked, f"--out={tmp_path}/out")
    plan = tmp_path / "out/.train-plan.json"
    plan.write_text(json.dumps([1]))
    assert "plan.json is damaged" in mistake(capsys, run, *asked, f"--out={tmp_path}/out")
