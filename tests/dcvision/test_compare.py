"""Comparing models: finished runs are kept, failing ones leave the others alone, and the report says what ran."""

import csv
import json
import math

import pytest
import torch
from torchvision.io import decode_image

from dctrain.errors import UserError
from dcvision.compare import compare
from dcvision.report import write_report
from tests.dcvision.commands import run

SHORT = [
    *("--trainer.max_epochs=2", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"),
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--model.warmup_steps=1"),
    "--trainer.log_every_n_steps=1",
]
CONFIG = "configs/vision/digits.yaml"
UNFINISHED = "not all runs have finished; the same command tries them again"
MODELS = ["dcvit_digits_patch2_8 model_kwargs.depth=1", "dcvit_nothing"]


@pytest.mark.slow
def test_a_comparison_goes_on_where_it_stopped(tmp_path, capsys):
    with pytest.raises(UserError, match=UNFINISHED):
        compare(CONFIG, MODELS, str(tmp_path), extra=SHORT)
    out = capsys.readouterr().out
    assert "2/2 dcvit_nothing | seed 0: failed with status 2: error: model 'dcvit_nothing' is unknown to timm" in out
    assert "| dcvit_digits_patch2_8 model_kwargs.depth=1 | 1 |" in out
    results = (tmp_path / "results.json").read_text()
    first = json.loads(results)["runs"][f"{MODELS[0]} | seed 0"]
    assert [step for step, _ in first["curves"]["val/top1"]] == [1, 3] and first["flops"] > 1e5
    assert first["environment"][-1]["torch"] == torch.__version__
    compare(CONFIG, MODELS[:1], str(tmp_path), extra=SHORT)
    assert "1/1 dcvit_digits_patch2_8 model_kwargs.depth=1 | seed 0: finished before" in capsys.readouterr().out
    (tmp_path / "results.json").unlink()  # as if it had been stopped before the results were written
    compare(CONFIG, MODELS[:1], str(tmp_path), extra=SHORT)
    again = json.loads((tmp_path / "results.json").read_text())["runs"][f"{MODELS[0]} | seed 0"]
    assert again["curves"]["train/loss"] == first["curves"]["train/loss"]
    assert again["curves"]["val/top1"] == first["curves"]["val/top1"]


def test_another_recipe_is_refused(tmp_path, capsys):
    (tmp_path / "results.json").write_text('{"recipe": {"config": "", "extra": []}, "runs": {}}')
    with pytest.raises(SystemExit) as exit_info:
        run("compare", "--config", CONFIG, "--models", "a", "--out", str(tmp_path), "--", "--trainer.max_epochs=1")
    assert exit_info.value.code == 2
    assert "holds a comparison by another recipe" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("compare", "--config", "nowhere.yaml", "--models", "a", "--out", str(tmp_path))
    assert "--config=nowhere.yaml does not exist" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path):
    compare(CONFIG, MODELS[:1], str(tmp_path), extra=SHORT)
    (tmp_path / "results.json").unlink()
    for checkpoint in (tmp_path / "runs").rglob("*.ckpt"):
        checkpoint.unlink()
    compare(CONFIG, MODELS[:1], str(tmp_path), extra=SHORT)
    assert len(list((tmp_path / "runs").glob("*/version_1/checkpoints/last-*.ckpt"))) == 1


def test_bad_folders_and_names(tmp_path):
    (tmp_path / "results.json").write_text("{")
    for models, folder, message in (
        (MODELS, tmp_path, "results.json cannot be read"),
        ([" "], tmp_path / "new", "--models holds an empty name"),
        (MODELS, "/proc/nowhere", "the folder /proc/nowhere/runs cannot be made"),
    ):
        with pytest.raises(UserError, match=message):
            compare(CONFIG, models, str(folder), extra=SHORT)
    for extra in (["--name=x"], ["--trainer.logger", "false"]):
        with pytest.raises(UserError, match=f"{extra[0].split('=')[0]} cannot stand after --: it is set for each run"):
            compare(CONFIG, MODELS, str(tmp_path / "new"), extra=extra)


@pytest.mark.slow
def test_a_run_that_trains_nothing_is_no_result(tmp_path, capsys):
    with pytest.raises(UserError, match=UNFINISHED):
        compare(CONFIG, MODELS[:1], str(tmp_path), extra=[*SHORT, "--trainer.fast_dev_run=true"])
    assert "trained nothing (see" in capsys.readouterr().out


@pytest.mark.long
def test_settings_may_hold_spaces_and_errors_are_told_whole(tmp_path, capsys):
    models = ["dcvit_digits_patch2_8 model_kwargs={depth: 1, num_heads: 5} lr=0.001"]
    with pytest.raises(UserError, match=UNFINISHED):
        compare(CONFIG, models, str(tmp_path), extra=SHORT)
    assert "dim=64 must be divisible by num_heads=5" in capsys.readouterr().out


@pytest.mark.long
def test_without_validation_a_run_is_no_result(tmp_path, capsys):
    with pytest.raises(UserError, match=UNFINISHED):
        compare(CONFIG, MODELS[:1], str(tmp_path), extra=[*SHORT, "--trainer.limit_val_batches=0"])
    assert "no validation was logged" in capsys.readouterr().out


def make_run(model: str, seed: int, top1: list[float]) -> dict:
    curve = [(10 * number, value) for number, value in enumerate(top1)]
    curves = {"val/top1": curve, "val/top5": [(step, 1.0) for step, _ in curve]}
    return {"model": model, "seed": seed, "curves": curves, "images_per_second": 5.0, "parameters": 7, "flops": 2e9}


def test_the_report(tmp_path):
    runs = [make_run("a", 0, [0.1, 0.6, 0.5]), make_run("a", 1, [0.2, 0.5, 0.7]), make_run("b", 0, [0.3, 0.3, 0.4])]
    runs.append(make_run("one validation", 0, [0.35]))
    table = write_report(runs, tmp_path)
    assert "| a | 2 | 7 | 2.00 | 5 | 60.00 | 14.14 | 100.00 | 65.00 |" in table and "| b | 1 | 7 |" in table
    with open(tmp_path / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert math.isclose(float(rows[0]["top1_sd"]), 100 * 0.2 / 2**0.5) and rows[1]["top1_sd"] == ""
    with open(tmp_path / "curves.csv") as file:
        assert len(list(csv.DictReader(file))) == (3 * 3 + 1) * 2
    picture = decode_image(str(tmp_path / "curves.png"))[:3].float()
    assert picture.shape[1:] == (600, 960) and (picture.flatten(1).std(1) > 10).all()
    for color in ([31, 119, 180], [255, 127, 14], [44, 160, 44]):  # beside the legend's, below
        drawn = (picture - torch.tensor(color)[:, None, None]).abs().sum(0) < 10
        drawn[450:] = False
        assert drawn.sum() > 15, color
