"""The scripts and notebooks under `examples/` train their models."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

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


def run_notebook(name: str, monkeypatch) -> str:
    """Execute a notebook in a new kernel; return its printed text."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # spinning threads slow each other down
    notebook = nbformat.read(ROOT / f"examples/{name}.ipynb", as_version=4)
    NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(ROOT / "examples")}}).execute()
    return "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))


@pytest.mark.slow
def test_notebook_fine_tunes_a_swapped_timm_model(monkeypatch):
    text = run_notebook("timm_digits", monkeypatch)
    assert float(re.search(r"composable attention: ([\d.]+)%", text)[1]) > 85


@pytest.mark.slow
def test_notebook_trains_a_language_model(monkeypatch):
    text = run_notebook("train_dcformer", monkeypatch)
    assert float(re.search(r"loss: ([\d.]+) nats", text)[1]) < 2.5 and "def main(" in text


@pytest.mark.parametrize("name", ["timm_digits", "train_dcformer"])
def test_notebooks_show_outputs_without_local_paths(name):
    notebook = nbformat.read(ROOT / f"examples/{name}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = "".join(output.get("text", "") + output.get("data", {}).get("text/plain", "") for output in outputs)
    assert text and "site-packages" not in text and str(ROOT) not in text


def test_every_script_is_short_and_tested():
    scripts = {file.stem: len(file.read_text().splitlines()) for file in (ROOT / "examples").glob("*.py")}
    assert scripts.keys() == {"plain_pytorch", "lightning_trainer", "huggingface_trainer"}
    assert max(scripts.values()) <= LINES
