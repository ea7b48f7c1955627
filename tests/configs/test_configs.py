"""Every YAML is parsed against the real signatures, names a model that exists, and has its header of facts."""

import subprocess
import sys
from pathlib import Path

import pytest
import timm
import yaml

import dcvision  # noqa: F401  registers the models

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs" / "vision").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_is_accepted_by_the_command_line(path):
    command = [sys.executable, "-m", "dcvision", "fit", "--config", str(path), "--print_config"]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
    config = yaml.safe_load(path.read_text())
    assert timm.is_model(config["model"]["model"])
    parsed = yaml.safe_load(result.stdout)
    assert parsed["model"]["lr"] == config["model"]["lr"]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_has_its_facts(path):
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for fact in ("command:", "hardware:", "time:", "result:"):
        assert any(line.startswith(f"# {fact}") for line in header), fact
    assert len(path.read_text().splitlines()) <= 60
