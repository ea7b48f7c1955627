"""The scripts under `examples/` train something."""

import os
import re
import subprocess
import sys

import pytest

from tests.dctrain.commands import ROOT

LINES = 60


def run(script: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, f"examples/{script}.py"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("script", ["plain_pytorch", "lightning_trainer"])
def test_classifier_learns_the_digits(script):
    *_, accuracy = re.findall(r"accuracy ([\d.]+) %", run(script))
    assert float(accuracy) > 85


@pytest.mark.slow
def test_language_model_learns_bytes():
    output = run("huggingface_trainer")
    assert float(re.search(r"loss ([\d.]+) nats", output)[1]) < 3.0 and "def main(" in output  # 5.5 without training


def test_every_script_is_short_and_tested():
    scripts = {file.stem: len(file.read_text().splitlines()) for file in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == {"plain_pytorch", "lightning_trainer", "huggingface_trainer"}
    assert max(scripts.values()) <= LINES
