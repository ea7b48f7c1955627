"""Length, time and price of planned runs, compared with real runs and values computed by hand."""

import json
import math
import re

import pytest
from torch.utils.tensorboard import SummaryWriter

from dclm.cli import main as dclm_main
from dctrain.errors import UserError
from dctrain.plan.length import Length, count_steps, describe_time, measured_speed, stated_speed
from dcvision.cli import main
from dcvl.cli import main as dcvl_main

TRAINER = {"max_steps": -1, "max_epochs": 3, "accumulate_grad_batches": 2, "limit_train_batches": None}
DIGITS = ["plan", "--config", "vision/digits", "--trainer.max_epochs=3"]


def planned(capsys, *options: str) -> dict[str, str]:
    """Return the lines of a plan by their first word."""
    main([*DIGITS, *options])
    return dict(re.findall(r"^(\w+) +(.*)$", capsys.readouterr().out, re.M))


@pytest.mark.parametrize(
    ("changed", "num_samples", "steps"),
    [
        ({}, 1000, 3 * math.ceil(15 / 2)),
        ({"limit_train_batches": 4}, 1000, 3 * 2),
        ({"limit_train_batches": 0.5}, 1000, 3 * math.ceil(7 / 2)),
        ({"max_steps": 7}, None, 7),
        ({"max_steps": 7}, 1000, 7),
        ({"max_steps": 700}, 1000, 3 * math.ceil(15 / 2)),
        ({"max_steps": 700, "max_epochs": None}, 1000, 700),
        ({"overfit_batches": 2}, 1000, 3 * 1),
        ({}, None, None),
    ],
)
def test_step_count_matches_expected_value(changed, num_samples, steps):
    assert count_steps(TRAINER | changed, num_samples, 64) == steps


def test_planned_steps_equal_steps_of_run(capsys, tmp_path):
    options = ["--trainer.accumulate_grad_batches=4", "--trainer.limit_train_batches=0.3"]
    length = planned(capsys, *options)["run"]
    assert length.startswith("3 epochs, ")
    quiet = ["--trainer.enable_progress_bar=false", f"--trainer.default_root_dir={tmp_path}", "--model.warmup_steps=1"]
    main(["fit", *DIGITS[1:], *options, *quiet, "--trainer.accelerator=cpu"])
    (checkpoint,) = tmp_path.glob("digits/version_0/checkpoints/last-step=*.ckpt")
    assert f" {checkpoint.stem.partition('=')[2]} steps, " in length


@pytest.mark.parametrize(
    ("program", "options"),
    [(dclm_main, ["--config", "lm/stdlib"]), (dcvl_main, ["--config", "vl/scenes", "--data.batch_size=32"])],
    ids=["dclm", "dcvl"],
)
def test_epochs_of_dclm_and_dcvl_are_counted_in_steps(capsys, program, options):
    program(["plan", *options, "--trainer.max_steps=-1", "--trainer.max_epochs=2"])
    assert re.search(r"^run +2 epochs, [\d,]+ steps, ", capsys.readouterr().out, re.M)


def test_time_and_price_match_stated_utilization(capsys):
    lines = planned(capsys, "--train_samples=64000", "--mfu=0.5", "--peak_tflops=0.1", "--hour_price=36")
    flops = float(re.search(r"([\d.e+]+) FLOPs", lines["run"])[1])
    assert "3,000 steps" in lines["run"]
    hours, price = (float(re.search(rf"{said}", lines["time"])[1]) for said in (r"^([\d.]+) h", r"price ([\d.]+)"))
    assert hours == pytest.approx(flops / 0.05e12 / 3600, abs=0.006)
    assert price == pytest.approx(36 * flops / 0.05e12 / 3600, rel=0.01)


def test_time_matches_measured_throughput(tmp_path):
    """Four devices at 100 images/s, with 2 forward FLOPs per image, give 150 FLOP/s per device."""
    (tmp_path / "costs.json").write_text(json.dumps({"forward_flops": 2, "unit": "images"}))
    (tmp_path / "environment.json").write_text(json.dumps([{"devices": 1}, {"devices": 4}]))
    with SummaryWriter(tmp_path) as writer:
        for step, rate in enumerate((1.0, 100.0, 100.0, 120.0, 90.0)):
            writer.add_scalar("train/images_per_second", rate, step)
    speed = measured_speed(str(tmp_path))
    assert speed.flops == pytest.approx(150)
    length = Length(steps=30, units=10, unit="images", flops=5, epochs=None)
    assert length.total_flops == 4500
    assert describe_time(length, 2, speed, None).startswith(f"{4500 / 300 / 3600:.2f} h")


@pytest.mark.parametrize(
    ("costs", "environment"),
    [
        *((costs, '[{"devices": 1}]') for costs in ("[]", "{}", "null", "3", '"text"', "[" * 100_000)),
        *((f'{{"forward_flops": {flops}, "unit": "images"}}', '[{"devices": 1}]') for flops in ("-1", "null", "[1]")),
        ('{"forward_flops": 2, "unit": [1]}', '[{"devices": 1}]'),
        *(('{"forward_flops": 2, "unit": "images"}', where) for where in ("{}", "[]", "[1]", '[{"devices": 0}]', "7")),
        (None, None),
    ],
)
def test_folder_without_measurement_is_rejected(tmp_path, costs, environment):
    if costs is not None:
        (tmp_path / "costs.json").write_text(costs)
        (tmp_path / "environment.json").write_text(environment)
    with pytest.raises(UserError, match="throughput="):
        measured_speed(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        (["--mfu=0"], "mfu"),
        (["--mfu=1e-320"], "mfu"),
        (["--peak_tflops=100"], "peak_tflops"),
        (["--throughput="], "throughput"),
        (["--trainer.fast_dev_run=true"], "fast_dev_run"),
        (["--trainer.limit_train_batches=1.5"], "limit_train_batches"),
        (["--trainer.limit_train_batches=0"], "limit_train_batches"),
        (["--data.stream_samples=-1"], "stream_samples"),
        (["--mfu=1.5"], "mfu"),
        (["--mfu=.nan"], "mfu"),
        (["--mfu=0.5", "--peak_tflops=0"], "peak_tflops"),
        (["--mfu=0.5", "--throughput=runs/a"], "throughput"),
        (["--hour_price=2"], "hour_price"),
        (["--mfu=0.5", "--hour_price=-2"], "hour_price"),
        (["--train_samples=0"], "train_samples"),
        (["--train_samples=10"], "train_samples"),
        (["--data.train=shards:nowhere/{0..9}.tar", "--mfu=0.5"], "train_samples"),
    ],
)
def test_invalid_estimate_options_are_rejected(capsys, options, argument):
    with pytest.raises(SystemExit) as stop:
        main([*DIGITS, *options])
    assert stop.value.code == 2
    assert f"{argument}=" in capsys.readouterr().err


def test_plan_without_data_names_train_samples_option(capsys):
    """The FLOPs of a step are known without the data; the plan names the option for the number of samples."""
    assert "--train_samples" in planned(capsys, "--data.train=shards:nowhere/{0..9}.tar")["run"]


def test_stated_speed_is_fraction_of_peak():
    assert stated_speed(0.25, 400).flops == 1e14
