"""The commands of `benchmarks/gpu.sh` run existing scripts with supported options."""

import os
import re
import subprocess
import sys

import pytest

from tests.dctrain.commands import ROOT

PARTS = ("default", "operator", "steps", "check", "tiles", "long", "cifar10")


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, list[list[str]]]:
    """Run each part with a `python` that only logs its arguments; return the logged commands."""
    folder = tmp_path_factory.mktemp("gpu")
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\t" "$@" >> {folder}/log\necho >> {folder}/log\n')
    python.chmod(0o755)
    found = {}
    for part in PARTS:
        (folder / "log").write_text("")
        arguments = [str(folder / "results"), *([part] if part != "default" else [])]
        environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"}
        subprocess.run(["bash", "benchmarks/gpu.sh", *arguments], cwd=ROOT, env=environment, capture_output=True)
        found[part] = [line.rstrip("\t").split("\t") for line in (folder / "log").read_text().splitlines()]
    return found


def test_default_runs_operator_and_steps(commands):
    assert commands["default"] == commands["operator"] + commands["steps"]
    assert all(commands.values())


@pytest.mark.slow
def test_scripts_support_all_used_options(commands):
    options = {}
    for script, *arguments in (command for part in commands.values() for command in part):
        if script == "-m":
            continue
        if script not in options:
            result = subprocess.run([sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True)
            assert result.returncode == 0, (script, result.stderr)
            options[script] = set(re.findall(r"--[a-z-]+", result.stdout))
        assert {argument for argument in arguments if argument.startswith("--")} <= options[script], script
