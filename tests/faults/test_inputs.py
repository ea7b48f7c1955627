"""Inputs that are empty, endless, or not written by the project."""

import json
import os
from pathlib import Path

import pytest
import timm
import torch

import dclm
from dclm.data.tokenizers import ByteTokenizer
from dcmha import DCAttention, analysis, split_heads
from dctrain.errors import UserError
from dcvision import ImageClassifier, ImageDataModule
from dcvision.attention_plots import read_image
from dcvision.data.sources import FolderSource
from dcvl import CaptionDataModule, VisionLanguageModel
from dcvl.commands.images import batches
from dcvl.load import LoadedPair
from tests.dclm.commands import run as run_dclm
from tests.dcvision.commands import run, small
from tests.dcvl.commands import run as run_dcvl

from .fault_injection import image_folder, mistake

NAMED = [
    (run, ["evaluate", "--checkpoint=a", "--images=digits"], ("compare", "real", "out", "device")),
    (run_dclm, ["evaluate", "--checkpoint=a", "--texts=b"], ("suites", "tokenizer", "compare", "task_folder")),
    (run_dclm, ["tokens", "--inputs=a", "--out=b"], ("val", "tokenizer")),
    (run, ["shards", "--out=b", "--num_shards=1"], ("folder",)),
    (run_dclm, ["verify"], ("tokens",)),
    (run_dcvl, ["classify", "--checkpoint=a", "--images=b"], ("templates", "classes")),
]


@pytest.mark.parametrize(("program", "given", "options"), NAMED, ids=[" ".join(given) for _, given, _ in NAMED])
def test_empty_names_are_rejected(capsys, program, given, options):
    for option in options:
        assert f"{option}='': expected a name or a path" in mistake(capsys, program, *given, f"--{option}=")


@pytest.fixture(params=["a device", "a pipe"])
def endless(request, tmp_path) -> Path:
    """Path with the name of an image: a link to an endless device, or a pipe without a writer."""
    path = tmp_path / "a.png"
    if request.param == "a device":
        path.symlink_to("/dev/zero")
    else:
        os.mkfifo(path)
    return path


def test_devices_and_pipes_are_rejected(tmp_path, capsys, endless, trained_lm):
    given = f"--checkpoint={trained_lm}"
    pair = ["retrieve", given, f"--images={tmp_path}"]
    for program, asked in (
        (run_dclm, ["tokens", f"--inputs={endless}", f"--out={tmp_path}/out"]),
        (run_dclm, ["tokens", f"--inputs={__file__}", f"--val={endless}", f"--out={tmp_path}/out"]),
        (run_dclm, ["evaluate", given, f"--texts={endless}", f"--out={tmp_path}/out"]),
        (run_dclm, ["evaluate", given, f"--suites={endless}", f"--out={tmp_path}/out"]),
        (run_dclm, ["explain", "circuits", given, f"--relations={endless}", f"--out={tmp_path}/out"]),
        (run_dcvl, [*pair, f"--texts={endless}"]),
        (run_dcvl, ["classify", given, "--images=digits", f"--classes={endless}"]),
    ):
        assert "Not a regular file" in mistake(capsys, program, *asked), asked
    for read in (
        lambda: read_image(str(endless), 8),
        lambda: next(batches(LoadedPair(torch.nn.Linear(1, 1), None, None, {}), [endless], 1)),
    ):
        with pytest.raises(UserError, match="Not a regular file"):
            read()


def test_image_folder_with_device_or_pipe_raises_error(tmp_path, endless):
    image_folder(tmp_path / "images")
    os.replace(endless, tmp_path / "images/a/endless.png")
    source = FolderSource(str(tmp_path / "images"))
    with pytest.raises(OSError, match="Not a regular file"):
        [source.read(index) for index in range(len(source))]


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_classes", -3, "num_classes=-3; expected a number of at least 0"),
        ("crop_pct", 0, "crop_pct=0; expected a fraction"),
        ("input_size", [3, 8], "input_size=[3, 8]; expected [channels, height, width]"),
        ("mean", [0.5], "mean=[0.5]; expected one number for each of 3 channels"),
        ("std", [0, 0, 0], "std=[0, 0, 0]; expected positive"),
        ("std", "zz", "std='zz'; expected positive"),
    ],
)
def test_exported_config_with_invalid_value_is_rejected(tmp_path, capsys, field, value, message):
    model = timm.create_model("dcvit_digits_patch2_8", num_classes=10)
    timm.models.save_for_hf(model, tmp_path / "model", safe_serialization=True)
    path = tmp_path / "model/config.json"
    content = json.loads(path.read_text())
    where = content if field == "num_classes" else content["pretrained_cfg"]
    where[field] = value
    path.write_text(json.dumps(content))
    asked = ["evaluate", f"--checkpoint={tmp_path}/model", "--images=digits", f"--out={tmp_path}/out"]
    assert message in mistake(capsys, run, *asked)


def test_plan_rejects_huge_context_length(capsys):
    asked = ["plan", "--config=lm/stdlib", "--data.context_length=1000000000"]
    assert "context_length=1000000000 must be at least 1 and at most 16777216" in mistake(capsys, run_dclm, *asked)


def test_deeply_nested_config_is_rejected(tmp_path, capsys):
    (tmp_path / "config.json").write_text("[" * 100_000)
    asked = ["generate", f"--checkpoint={tmp_path}", "--prompt=a"]
    assert "config.json is not JSON" in mistake(capsys, run_dclm, *asked)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--seed_everything=-1", "seed_everything=-1: expected 0 to 4294967295"),
        ("--name=", "name='' must be the name of a folder"),
        ("--resume=", "resume='': expected a name or a path"),
        ("--throughput=", "throughput='': expected a name or a path"),
        ("--trainer.max_time=junk", "trainer.max_time='junk'"),
        ("--trainer.limit_train_batches=0", "trainer.limit_train_batches=0 leaves no data to train on"),
        ("--trainer.limit_val_batches=-1", "trainer.limit_val_batches=-1: expected a number of batches"),
        ("--trainer.val_check_interval=-3", "trainer.val_check_interval=-3 must be a positive number"),
        ("--trainer.strategy=deepspeed", "trainer.strategy deepspeed is not supported"),
        ("--resume=nowhere", "no checkpoint: nowhere does not exist"),
        ("--data.batch_size=1000000000000000", "batch_size=1000000000000000: expected a whole number from 1 to"),
    ],
)
def test_plan_rejects_invalid_arguments(shards, tmp_path, capsys, wrong, message):
    assert message in mistake(capsys, run, "plan", *small(shards, tmp_path), wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("--model.lr=1e300", "lr=1e+300 must be in [0, 1e+06]"),
        ("--data.image_size=9", "image_size=9 must be a multiple of the model's patch size, 2"),
        ("--trainer.callbacks+=dcvl.callbacks.ExactCaptions", "ExactCaptions requires a captioner"),
    ],
)
def test_fit_rejects_invalid_arguments(shards, tmp_path, capsys, wrong, message):
    assert message in mistake(capsys, run, "fit", *small(shards, tmp_path), wrong)


def test_duplicate_models_and_invalid_num_workers_are_rejected(capsys):
    twice = ["compare", "--config=vision/digits", "--models", "mhavit_digits_patch2_8", "mhavit_digits_patch2_8"]
    assert "models: 'mhavit_digits_patch2_8' is given twice" in mistake(capsys, run, *twice)
    for asked in (["evaluate"], ["explain", "ablate"]):
        for workers in (-1, 1_000_000):
            given = [*asked, "--checkpoint=a", "--images=digits", f"--num_workers={workers}"]
            assert f"num_workers={workers}: expected 0 to 512" in mistake(capsys, run, *given)


@pytest.mark.parametrize(
    ("content", "value"),
    [
        ("texts: {a: 1}\n", "texts={'a': 1}"),
        ("texts: x\n", "texts='x'"),
        ("texts: null\n", "texts=None"),
        ("checkpoint: null\ntexts: [a]\n", "checkpoint=None"),
    ],
)
def test_config_file_with_invalid_list_is_rejected(tmp_path, capsys, content, value):
    (tmp_path / "a.yaml").write_text(content)
    said = mistake(capsys, run_dclm, "evaluate", f"--config={tmp_path}/a.yaml")
    assert said == f"error: {value}: expected a list."


def test_error_message_length_is_limited(tmp_path, capsys):
    (tmp_path / "a.yaml").write_text("some words, and no settings " * 1000)
    said = mistake(capsys, run_dclm, "fit", f"--config={tmp_path}/a.yaml")
    assert len(said) < 2500


def test_best_metric_is_printed_with_additional_model_checkpoint(shards, tmp_path, capsys):
    mine = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.filename=mine"]
    run("fit", *small(shards, tmp_path), *mine, "--trainer.max_epochs=1")
    assert capsys.readouterr().out.splitlines()[-1].startswith("best val/top1 ")


def test_export_into_run_folder_is_rejected(shards, tmp_path, capsys):
    run("fit", *small(shards, tmp_path), "--trainer.max_epochs=1")
    version = tmp_path / "t/version_0"
    error = mistake(capsys, run, "export", f"--checkpoint={version}", f"--out={version}")
    assert "is the folder of a run; expected a separate folder" in error


def test_invalid_values_of_function_arguments_raise_error():
    layer = DCAttention(8, 4)
    for ranks in (-1, 0, 1.5):
        with pytest.raises(ValueError, match="ranks=.* must be an integer of at least 1"):
            split_heads(layer, ranks)
    assert layer.num_heads == 4
    decoder = dclm.Decoder(dclm.decoder_config("dcformer_pp_debug", num_layers=1, vocab_size=11))
    with pytest.raises(ValueError, match="input_ids: .*; expected prompts of one length"):
        dclm.beam_search(decoder, [[1], [1, 2]], 2, num_beams=2)
    for betas in ((0.9,), (0.9, 1.0)):
        with pytest.raises(UserError, match="betas=.* two numbers"):
            dclm.LanguageModel(betas=betas)
    with pytest.raises(UserError, match="batch_size=1.5 must be of type int"):
        dclm.TokenDataModule(batch_size=1.5)


def test_invalid_types_of_module_arguments_raise_error():
    for make, wrong in (
        (dclm.LanguageModel, {"compile": "x", "decay_all": "x", "lr": "1", "warmup_fraction": None}),
        (dclm.TokenDataModule, {"num_workers": 1.5, "seed": "0", "tokens": None, "val_tokens": 1.5}),
        (ImageDataModule, {"train": None, "max_pixels": 1.5, "horizontal_flip": 1, "batch_size": "4"}),
        (ImageClassifier, {"seed": 1.5, "warmup_steps": 1.5, "label_smoothing": "0", "ema_decay": "x"}),
        (VisionLanguageModel, {"seed": 1.5, "caption_weight": "x"}),
        (CaptionDataModule, {"train": 5, "context_length": 1.5}),
    ):
        for name, value in wrong.items():
            with pytest.raises(UserError, match=f"{name}=.* must be of type "):
                make(**{name: value})


def test_invalid_arguments_of_analysis_raise_error():
    layer = DCAttention(8, 4)
    model = torch.nn.Sequential(layer)
    for head in (None, True, 4, -1):
        with pytest.raises(ValueError, match="head=.*; expected 0 to 3"):
            analysis.head_outputs(layer, torch.randn(3, 8), head)
    with pytest.raises(ValueError, match="x has 7 channels; expected 8"):
        analysis.head_outputs(layer, torch.randn(3, 7), 0)
    (branch, *_) = analysis.composition_branches(model)
    for factor in (None, "x", torch.ones(3)):
        said = pytest.raises(ValueError, match="expected a number or a scalar tensor")
        with said, analysis.scale_branches(model, {branch: factor}):
            pass
    for factor in (1.0, None, torch.ones(3)):
        said = pytest.raises(ValueError, match=r"expected a tensor \[4\]")
        with said, analysis.scale_heads(model, {"0": factor}):
            pass
    for heads, groups in ((0, 1), (4, 3), ("x", 1)):
        with pytest.raises(ValueError, match="num_"):
            analysis.MixingMeter(heads, groups)
    decoder = dclm.Decoder(dclm.decoder_config("dcformer_pp_debug", num_layers=1, vocab_size=11))
    ids, row = torch.ones(2, 5, dtype=torch.long), torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="places and targets have the shapes"):
        decoder.likelihood(ids, (row, row[:1]), row)
    with pytest.raises(ValueError, match=r"pairs\[0\]='ab'"):
        dclm.encode_pairs(ByteTokenizer(), ["ab"])
