"""Configurations are found by name from any folder, and unbounded YAML is rejected before it is expanded."""

from pathlib import Path

import pytest

import dcvision.cli
from dctrain.cli.named_configs import FOLDER, find_config
from dctrain.cli.safe_yaml import check_yaml_file
from dctrain.errors import UserError
from tests.dclm.commands import run as run_dclm
from tests.dcvision.commands import run as run_dcvision
from tests.faults.fault_injection import mistake

LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "laughs": LAUGHS,
    "recursive": "a: &a {b: *a}\n",
    "deep": "a: " + "[" * 500 + "]" * 500,
    "very deep": "a: " + "[" * 1_500 + "]" * 1_500,
    "large": "a: " + "x" * 2**21,
    "digits": "seed_everything: " + "9" * 5000,
}


@pytest.mark.parametrize("name", ["vision/digits", "configs/vision/digits.yaml", "vision/digits.yaml"])
def test_names_are_found_from_any_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert Path(find_config(name)).read_text() == (FOLDER / "vision/digits.yaml").read_text()
    (tmp_path / "vision/digits").mkdir(parents=True)  # a folder is not a configuration
    assert Path(find_config("vision/digits")).parent == FOLDER / "vision"
    (tmp_path / "vision/digits").rmdir()
    (tmp_path / "vision/digits").write_text("own")
    assert find_config("vision/digits") == "vision/digits"  # a file of the user takes precedence


@pytest.mark.parametrize(
    "name", ["nothing", "{a: " + "x" * 300 + "}", "../cli.py", "vision/../../cli.py", "/etc/passwd"]
)
def test_other_names_are_unchanged(name):
    assert find_config(name) == name


def test_commands_accept_config_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_dcvision("plan", "--config", "vision/digits")
    assert "planned for one" in capsys.readouterr().out
    run_dcvision("plan", "--config=vision/digits", "--trainer.devices=4")
    assert "mesh        4 ranks" in capsys.readouterr().out
    assert "results.json" in mistake(capsys, run_dcvision, "compare", "--experiment=experiments/digits", "--report")


def test_configs_command_lists_configurations(capsys):
    dcvision.cli.main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    listed = {line.split()[0] for line in lines if "/" in line.split(" ")[0]}
    assert {f"vision/{path.stem}" for path in (FOLDER / "vision").glob("*.yaml")} <= listed
    assert "experiments/table8" in listed and "experiments/table9" not in listed  # table9 belongs to dclm


@pytest.mark.parametrize("name", HOSTILE)
def test_unbounded_yaml_is_rejected(tmp_path, capsys, name):
    (tmp_path / "x.yaml").write_text(HOSTILE[name])
    with pytest.raises(UserError, match="x.yaml"):
        check_yaml_file(tmp_path / "x.yaml")
    for run, command in ((run_dcvision, ["fit"]), (run_dclm, ["generate"])):
        assert "x.yaml" in mistake(capsys, run, *command, f"--config={tmp_path / 'x.yaml'}")
    for option in ("--experiment", "--config"):
        assert "x.yaml" in mistake(capsys, run_dcvision, "compare", f"{option}={tmp_path / 'x.yaml'}")


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.yaml")), ids=lambda path: path.stem)
def test_project_configurations_pass_yaml_check(path):
    check_yaml_file(path)
