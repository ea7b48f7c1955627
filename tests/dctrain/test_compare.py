"""Comparison of models: finished runs are kept, failed runs do not affect others, and the report lists the runs."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from scipy import stats
from torchvision.io import decode_image

from dctrain.compare.experiment import experiment_of, read_experiment
from dctrain.compare.report import write_report
from dctrain.compare.results import ComparisonResults
from dctrain.compare.statistics import ItemNoise, item_noise, paired_difference
from dctrain.compare.training import environments, run_items
from dctrain.errors import UserError
from dctrain.evaluation.items import ItemRecorder, Items, read_items, write_items
from tests.dctrain.commands import ROOT
from tests.dcvision.commands import run

CONFIG = "configs/vision/digits.yaml"
METRICS = {"val/top1": "max", "val/loss": "min"}
SHORT = [
    *("--trainer.max_epochs=2", "--trainer.limit_train_batches=2", "--trainer.limit_val_batches=1"),
    *("--trainer.accelerator=cpu", "--model.warmup_steps=1", "--trainer.log_every_n_steps=1"),
]
MODELS = ["dcvit_digits_patch2_8 model_kwargs.depth=1", "dcvit_nothing"]


def compare(*args: str) -> None:
    run("compare", *args)


def refused(capsys, *args: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        compare(*args)
    assert exit_info.value.code == 2
    return capsys.readouterr().err


@pytest.mark.slow
def test_comparison_resumes_after_failed_run(tmp_path, capsys):
    args = ["--config", CONFIG, "--out", str(tmp_path), "--models", *MODELS]
    with pytest.raises(SystemExit):
        compare(*args, "--", *SHORT)
    captured = capsys.readouterr()
    assert "some runs have failed; run the same command to repeat them" in captured.err
    assert "dcvit_nothing | seed 0: failed with status 2: error: model 'dcvit_nothing' is unknown" in captured.out
    assert "| dcvit_digits_patch2_8 model_kwargs.depth=1 |     1 |" in captured.out
    assert "Not finished: dcvit_nothing | seed 0" in captured.out
    key = f"{MODELS[0]} | seed 0"
    first = json.loads((tmp_path / "results.json").read_text())["runs"][key]
    assert [step for step, _ in first["curves"]["val/top1"]] == [2, 4] and first["forward_flops"] > 1e5
    assert first["environment"][-1]["torch"] == torch.__version__ and first["unit"] == "images"
    (items,) = map(read_items, (tmp_path / "items").iterdir())
    for metric in ("val/top1", "val/top5", "val/loss"):
        values = items[metric].values.values()
        assert len(values) == 64 and sum(values) / 64 == pytest.approx(first["curves"][metric][-1][1], rel=1e-5)
    compare(*args[:-1], "--", *SHORT)
    assert f"{key}: already finished, val/top1" in capsys.readouterr().out
    (tmp_path / "results.json").unlink()  # simulates a stop before the results were written
    compare(*args[:-1], "--", *SHORT)
    again = json.loads((tmp_path / "results.json").read_text())["runs"][key]
    assert again["curves"] == first["curves"]
    for path in (tmp_path / "table.md", tmp_path / "curves.png"):
        path.unlink()
    compare(*args[:-1], "--report", "--", *SHORT)
    assert (tmp_path / "table.md").is_file() and (tmp_path / "curves.png").is_file()


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.long), pytest.param(signal.SIGKILL, marks=pytest.mark.long)],
)
def test_killed_experiment_resumes_without_repeating_steps(tmp_path, number):
    """Two parallel runs resume from their checkpoints and reach the results of an uninterrupted run."""
    steps = [
        "--trainer.max_epochs=8",
        "--trainer.limit_train_batches=4",
        "--model.warmup_steps=2",
        "--trainer.limit_val_batches=1",
        "--trainer.accelerator=cpu",
    ]
    steps += ["--trainer.log_every_n_steps=1", "--checkpoint_every_n_steps=1"]
    command = [sys.executable, "-m", "dcvision", "compare", "--config", CONFIG, "--models", MODELS[0]]
    alone = [*command, "--seeds", "0", "--out"]
    command += ["--seeds", "0", "1", "--jobs", "2", "--out"]
    options = {"cwd": ROOT, "env": os.environ | {"OMP_NUM_THREADS": "1"}, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([*command, str(tmp_path / "part"), "--", *steps], **options, stderr=subprocess.STDOUT)
    while len(list(tmp_path.glob("part/runs/*/version_0/checkpoints/last-*.ckpt"))) < 2:
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    if number == signal.SIGTERM:
        assert process.returncode == 2 and "stopped; run the same command again to continue" in said
    # after SIGKILL, the runs continue as orphans, and the next command waits for them
    for folder, asked in (("part", command), ("whole", alone)):
        done = subprocess.run([*asked, str(tmp_path / folder), "--", *steps], **options, timeout=120)
        assert done.returncode == 0, done.stdout
    part, whole = (json.loads((tmp_path / folder / "results.json").read_text())["runs"] for folder in ("part", "whole"))
    for key, result in whole.items():
        assert part[key]["curves"] == result["curves"], key
    assert len(list(tmp_path.glob("part/runs/*/version_*"))) == 2


@pytest.mark.long
def test_runs_without_result_report_reason(tmp_path, capsys):
    args = ["--config", CONFIG, "--models", MODELS[0], "--out"]
    refused(capsys, *args, str(tmp_path / "dev"), "--", *SHORT, "--trainer.fast_dev_run=true")
    assert "trained nothing (see" in (tmp_path / "dev/results.json").read_text()
    short = dict(argument.removeprefix("--").split("=") for argument in SHORT)
    experiment = write(tmp_path, metrics={"val/top2": "max"}, arguments=short)
    refused(capsys, "--experiment", experiment, "--out", str(tmp_path / "metric"))
    assert "val/top2 was not logged, but val/" in (tmp_path / "metric/results.json").read_text()


def write(folder: Path, **fields) -> str:
    content = {"config": CONFIG, "seeds": [0], "models": {"a": {"model.model": MODELS[0].split()[0]}}} | fields
    path = folder / "experiment.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in content.items() if value is not None}))
    return str(path)


A, B = {"model.model": "a"}, {"model.model": "b", "model.lr": 1}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"color": 1}, "has the unknown field 'color'; expected title, config, models"),
        ({"models": None}, "requires the field 'models' of type dict; got None"),
        ({"models": {}}, "models is empty or has an empty name"),
        ({"models": {"x": A, "y": B, "z": dict(reversed(B.items()))}}, "models 'y' and 'z' have the same arguments"),
        ({"models": {"x": "a"}}, "'a' is not a mapping of arguments to values"),
        ({"models": {"x": {"data.seed": 1}}}, "data.seed of 'x' is not allowed: it is set for each run"),
        ({"arguments": {"name": "x"}}, "name of all runs is not allowed"),
        ({"seeds": [1, 1]}, "seeds=[1, 1] must be one or more distinct"),
        ({"seeds": [-1]}, "seeds=[-1] must be one or more distinct"),
        ({"models": {"x": {"data": {"seed": 5}}}}, "data.seed of 'x' is not allowed"),
        ({"models": {"x": {"trainer.logger.class_path": "y"}}}, "trainer.logger.class_path of 'x' is not allowed"),
        ({"models": {"x": {"model.lr": 1}}, "arguments": {"model": {"lr": 2}}}, "it is given for all runs (model.lr)"),
        ({"seeds": [1, True]}, "seeds=[1, True] must be one or more distinct"),
        ({"metrics": {}}, "metrics is empty"),
        ({"paper": {"a": "11.7 %"}}, "paper: a='11.7 %' is not a number"),
        ({"families": []}, "families=[] must be a dict"),
        ({"seeds": []}, "seeds=[] must be one or more distinct"),
        ({"baseline": "b"}, "baseline='b' is not one of the models: a"),
        ({"metrics": {"val/loss": "least"}}, "metrics: val/loss='least'; expected min or max"),
        ({"paper": {"b": 1.0}}, "'b' in paper or families is not one of the models"),
        ({"families": {"plain": ["b"]}}, "'b' in paper or families is not one of the models"),
        ({"config": "nowhere.yaml"}, "--config=nowhere.yaml does not exist"),
    ],
)
def test_invalid_experiment_raises_error(tmp_path, fields, said):
    with pytest.raises(UserError) as error:
        read_experiment(write(tmp_path, **fields), METRICS)
    assert said in str(error.value)


def test_duplicate_key_raises_error(tmp_path):
    for text in ("seeds: [0]\nseeds: [1]\n", "models: {1: {a: 1}, '1': {a: 2}}\n"):
        (tmp_path / "twice.yaml").write_text(text)
        with pytest.raises(UserError, match="given twice"):
            read_experiment(str(tmp_path / "twice.yaml"), METRICS)


def test_recipe_is_read_once_and_written_before_training(tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("model: {lr: 1.0}\ndata: {when: 2026-01-01, x: .nan}\n")
    experiment = read_experiment(write(tmp_path, config=str(recipe)), METRICS)
    results = ComparisonResults(tmp_path, experiment)
    results.write()
    ComparisonResults(tmp_path, experiment)
    recipe.write_text("model: {lr: 2.0}\n")
    results.add(experiment.runs[0], make_result([0.5]))
    assert json.loads((tmp_path / "results.json").read_text())["recipe"]["config"]["model"] == {"lr": 1.0}
    with pytest.raises(UserError, match="a different recipe"):
        ComparisonResults(tmp_path, experiment)


def test_metric_missing_in_finished_run_raises_error(tmp_path):
    experiment = read_experiment(write(tmp_path), METRICS)
    ComparisonResults(tmp_path, experiment).add(experiment.runs[0], make_result([0.5]))
    with pytest.raises(UserError, match="a | seed 0 has not logged val/top5"):
        ComparisonResults(tmp_path, read_experiment(write(tmp_path, metrics={"val/top5": "max"}), METRICS))


def test_experiment_is_read_from_file(tmp_path):
    kwargs = {"model.model_kwargs": {"depth": 1}, "model.swap": True, "model.model": "a", "model.lr": 1e-3}
    experiment = read_experiment(write(tmp_path, models={"x": kwargs, "y": A}, seeds=[3, 4]), METRICS, ["--data.x=1"])
    expected = ('--model.model_kwargs={"depth": 1}', "--model.swap=true", "--model.model=a", "--model.lr=0.001")
    assert sorted(experiment.models["x"]) == sorted(expected)
    assert [run.key for run in experiment.runs] == ["x | seed 3", "y | seed 3", "x | seed 4", "y | seed 4"]
    assert experiment.baseline == "x" and experiment.metrics == METRICS and experiment.arguments == ("--data.x=1",)


def test_invalid_arguments_are_rejected(tmp_path, capsys):
    out = ["--out", str(tmp_path / "new")]
    assert "--experiment or --config is required" in refused(capsys, *out)
    experiment = write(tmp_path)
    assert "cannot be combined with config" in refused(capsys, "--experiment", experiment, "--config", CONFIG, *out)
    assert "jobs=0 must be at least 1" in refused(capsys, "--experiment", experiment, "--jobs", "0")
    assert "nowhere.yaml cannot be read" in refused(capsys, "--experiment", "nowhere.yaml", *out)
    assert "has no finished run" in refused(capsys, "--experiment", experiment, "--report", *out)
    recipe = ["--config", CONFIG, "--models", "a", *out]
    assert "trainer.logger of all runs is not allowed" in refused(capsys, *recipe, "--", "--trainer.logger=x")
    assert "the folder /proc/nowhere" in refused(capsys, "--experiment", experiment, "--out", "/proc/nowhere")


def test_results_of_different_recipe_are_rejected_and_kept(tmp_path, capsys):
    experiment = write(tmp_path)
    results = ComparisonResults(tmp_path, read_experiment(experiment, METRICS))
    results.add(results.experiment.runs[0], make_result([0.5]))
    before = (tmp_path / "results.json").read_text()
    other = write(tmp_path, arguments={"trainer.max_epochs": 1})
    out = ["--out", str(tmp_path)]
    assert "a different recipe" in refused(capsys, "--experiment", other, *out)
    other = write(tmp_path, models={"a": B})
    assert "has a | seed 0 with different arguments: --model.model=" in refused(capsys, "--experiment", other, *out)
    assert (tmp_path / "results.json").read_text() == before
    (tmp_path / "results.json").write_text("{")
    assert "results.json cannot be read" in refused(capsys, "--experiment", experiment, "--out", str(tmp_path))


def test_parallel_jobs_share_cpu_threads():
    threads = torch.get_num_threads()
    if torch.cuda.device_count() == 0:
        assert environments(2) == [{"OMP_NUM_THREADS": str(max(1, threads // 2))}] * 2
    assert environments(1) == [{}]


def test_paired_difference_matches_scipy():
    first, second = {0: 1.0, 1: 2.5, 2: 2.0, 7: 9.0}, {0: 1.5, 1: 2.0, 2: 4.0, 3: 0.0}
    difference = paired_difference(first, second)
    interval = stats.ttest_rel([1.0, 2.5, 2.0], [1.5, 2.0, 4.0]).confidence_interval(0.95)
    assert difference[:3] == pytest.approx((-2 / 3, interval.low, interval.high)) and difference.pairs == 3
    # a paired t-test with this number of pairs detects an effect of this size with a power of 0.8
    sd = stats.tstd([-0.5, 0.5, -2.0])
    generator = torch.Generator().manual_seed(0)
    draws = difference.detectable + sd * torch.randn(20000, 3, generator=generator, dtype=torch.float64)
    reach = stats.t.ppf(0.975, 2) * draws.std(1) / 3**0.5
    assert ((draws.mean(1) - reach) > 0).double().mean() == pytest.approx(0.8, abs=0.12)
    assert paired_difference({0: 1.0}, {0: 3.0}) == (-2.0, None, None, None, 1, None)
    assert paired_difference({0: 1.0}, {1: 3.0}) is None


def named(values) -> Items:
    names = [str(number) for number in range(len(values))]
    return Items(dict(zip(names, map(float, values), strict=True)), dict.fromkeys(names, 1.0))


def test_tied_seeds_use_evaluation_noise():
    """Two seeds with equal differences have no spread; the noise of the evaluation remains."""
    tied = {0: 71.0, 1: 73.0}, {0: 73.0, 1: 75.0}
    assert paired_difference(*tied)[:4] == (-2.0, None, None, None)
    first, second = torch.rand(100) < 0.7, torch.rand(100) < 0.7
    noise = item_noise([(named(first), named(second))] * 2, is_fraction=True)
    difference = (first.float() - second.float()).numpy()
    assert noise.error == pytest.approx(stats.sem(difference), rel=1e-6) and noise.count == 100
    found = paired_difference(*tied, noise)
    reach = stats.t.ppf(0.975, 99) * noise.error
    assert (found.low, found.high) == pytest.approx((-2 - reach, -2 + reach)) and found.items == 100


def test_equal_answers_give_nonzero_interval():
    noise = item_noise([(named([1, 0, 1, 1]), named([1, 0, 1, 1]))] * 2, is_fraction=True)
    assert noise == ItemNoise(0.0, 4, 0.75)
    assert paired_difference({0: 0.75, 1: 0.75}, {0: 0.75, 1: 0.75}, noise)[:3] == (0, -0.75, 0.75)


def test_item_noise_is_none_for_different_items():
    pairs = [(named([1, 0]), named([1, 0, 1]))]
    assert item_noise(pairs, is_fraction=True) is None and item_noise([], is_fraction=True) is None


def test_item_noise_uses_item_weights():
    """An item of weight 2 counts as two of weight 1 in the mean."""
    first, second = named([1.0, 3.0, 0.0]), named([0.0, 0.0, 0.0])
    weights = {"0": 1.0, "1": 2.0, "2": 1.0}
    noise = item_noise([(first._replace(weights=weights), second._replace(weights=weights))], is_fraction=False)
    mean = (1 + 2 * 3 + 0) / 4
    squares = [(w / 4) ** 2 * (v - mean) ** 2 for v, w in ((1, 1), (3, 2), (0, 1))]
    assert noise.error == pytest.approx((sum(squares) * 3 / 2) ** 0.5) and noise.least == 0


def test_intervals_cover_true_difference():
    """At least 94 % of 600 simulated intervals, with noise of seeds and items, cover the true difference."""
    generator, covered, without = torch.Generator().manual_seed(0), 0, 0
    for _ in range(600):
        seeds, items = 0.02 * torch.randn(3, 1, generator=generator), 0.5 * torch.randn(60, generator=generator)
        scores = 0.1 + seeds + items + 0.1 * torch.randn(3, 60, generator=generator)
        of, to = dict(enumerate(scores.mean(1).tolist())), dict.fromkeys(range(3), 0.0)
        noise = item_noise([(named(row.tolist()), named([0] * 60)) for row in scores], is_fraction=False)
        counted, alone = paired_difference(of, to, noise), paired_difference(of, to)
        covered += counted.low <= 0.1 <= counted.high
        without += alone.low <= 0.1 <= alone.high
    assert covered >= 0.94 * 600 and without < 0.8 * 600


def test_item_values_are_stored_by_name(tmp_path):
    for rank, names in enumerate((["a", "b"], ["c"])):
        recorder = ItemRecorder()
        recorder.add("val/loss", ["old"] * len(names), torch.ones(len(names)))
        recorder.clear()
        recorder.add("val/loss", names, torch.arange(len(names)) + 0.5)
        recorder.add("val/loss", [""], torch.ones(1))
        recorder.write(tmp_path, rank, 2)
    found = read_items(tmp_path)
    assert found == {"val/loss": Items({"a": 0.5, "b": 1.5, "c": 0.5}, {"a": 1.0, "b": 1.0, "c": 1.0})}
    write_items(tmp_path / "copy", found)
    assert read_items(tmp_path / "copy") == found


def test_items_of_larger_previous_world_are_removed(tmp_path):
    for rank, world_size, value in ((1, 2, 9.0), (0, 1, 1.0)):
        recorder = ItemRecorder()
        recorder.add("val/loss", ["a"], torch.tensor([value]))
        recorder.write(tmp_path, rank, world_size)
    assert read_items(tmp_path)["val/loss"].values == {"a": 1.0}
    ItemRecorder().write(tmp_path, 0, 1)  # a run without evaluation keeps the existing items
    assert read_items(tmp_path)["val/loss"].values == {"a": 1.0}


def make_result(top1: list[float]) -> dict:
    curve = [(10 * number, value) for number, value in enumerate(top1)]
    curves = {"val/top1": curve, "val/loss": [(step, 1 - value) for step, value in curve]}
    where = [{"device": "a CPU", "torch": "2", "commit": "abc"}]
    costs = {"units_per_second": 5.0, "parameters": 7, "forward_flops": 2e9, "unit": "images"}
    return {"curves": curves, "environment": where, **costs}


def test_report_contains_table_and_curves(tmp_path):
    made = {"a": [[0.1, 0.6, 0.5], [0.2, 0.5, 0.7]], "b": [[0.3, 0.3, 0.4], [0.3, 0.4, 0.5]]}
    made["one validation"] = [[0.35]]
    models = {name: {"model.model": name} for name in made}
    experiment = read_experiment(write(tmp_path, models=models, seeds=[0, 1], title="T", paper={"b": 4.5}), METRICS)
    results = ComparisonResults(tmp_path, experiment)
    for model, curves in made.items():
        for seed, top1 in enumerate(curves):
            run = next(run for run in experiment.runs if (run.model, run.seed) == (model, seed))
            results.add(run, make_result(top1))
    results = ComparisonResults(tmp_path, experiment)  # as read by another process
    table = write_report(experiment, results, tmp_path)
    interval = "-15.00 [-78.53, +48.53]"
    lines = [" ".join(line.split()) for line in table.splitlines()]
    first, second, third = (next(line for line in lines if line.startswith(f"| {model} |")) for model in made)
    assert first.startswith("| a | 2 | 7 | 2000.00 | 5 | 60.00 (14.14) | 65.00 | - | - |")
    assert f"| 45.00 (7.07) | 45.00 | {interval} |" in second and second.endswith("| 4.50 |")
    assert third.startswith("| one validation | 1 |") and "| -15.00 | - |" in third
    assert "Not finished: one validation | seed 1" in table and "Hardware: a CPU, torch 2, commit abc" in table
    assert "val/top1: intervals include the variation over seeds only, not the evaluation noise" in table
    for run in experiment.runs:
        write_items(run_items(tmp_path, experiment, run), {"val/top1": named([1, 0, run.model == "a"])})
    counted = write_report(experiment, results, tmp_path)
    assert "val/top1: intervals include the variation over seeds and the 3 items of the evaluation." in counted
    assert "val/loss: intervals include the variation over seeds only" in counted
    with open(tmp_path / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["val/top1 high"]) - float(rows[1]["val/top1 low"]) >= 2 * 100 * 3 / 3
    assert float(rows[0]["val/top1 sd"]) == pytest.approx(100 * 0.2 / 2**0.5) and rows[2]["val/top1 low"] == ""
    assert float(rows[1]["val/loss difference"]) == pytest.approx(0.15)
    with open(tmp_path / "curves.csv") as file:
        assert len(list(csv.DictReader(file))) == (4 * 3 + 1) * 2
    picture = decode_image(str(tmp_path / "curves.png"))[:3].float()
    height = picture.shape[1]
    for color in ([31, 119, 180], [255, 127, 14], [44, 160, 44]):  # excludes the legend at the bottom
        drawn = (picture - torch.tensor(color)[:, None, None]).abs().sum(0) < 10
        for rows in (slice(0, height * 2 // 5), slice(height * 2 // 5, height * 4 // 5)):
            assert drawn[rows].sum() > 15, color


def test_separate_option_values_are_not_read_as_options():
    experiment_of(CONFIG, ["x"], [0], METRICS, ("--data.train", "name", "--trainer.max_epochs", "3"))
    with pytest.raises(UserError, match="data.seed of all runs is not allowed"):
        experiment_of(CONFIG, ["x"], [0], METRICS, ("--data.seed", "3"))


def test_command_line_model_settings_become_arguments():
    experiment = experiment_of(CONFIG, ["x  model_kwargs={depth: 1, num_heads: 5} lr=0.1", "y"], [0], METRICS, ())
    expected = ("--model.model=x", "--model.model_kwargs={depth: 1, num_heads: 5}", "--model.lr=0.1")
    assert experiment.models["x model_kwargs={depth: 1, num_heads: 5} lr=0.1"] == expected
