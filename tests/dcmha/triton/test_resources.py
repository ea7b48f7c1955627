"""What the kernels take of a GPU, compiled ahead of time: no spills to speak of, little shared memory."""

import json
import os
import subprocess
import sys

import pytest

from tests.dctrain.commands import ROOT

from .aot import VARIANTS

MAX_SPILLS = 64
MAX_SHARED = 48 * 1024
SHIPPED = [("80", "16 heads"), ("90", "16 heads"), ("100", "16 heads")]
OTHERS = [name for name in VARIANTS if name != "16 heads"]


def resources(capability: str, *variants: str) -> dict[str, dict[str, int]]:
    """Compile in a process of its own, without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.dcmha.triton.aot", capability, *variants]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=570)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "variant"), SHIPPED)
def test_shipped_configurations(capability, variant):
    for name, row in resources(capability, variant).items():
        assert row["spills"] <= MAX_SPILLS and row["shared"] <= MAX_SHARED, (name, row)


@pytest.mark.long
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_other_configurations(capability):
    for name, row in resources(capability, *OTHERS).items():
        assert row["spills"] <= MAX_SPILLS and row["shared"] <= MAX_SHARED, (name, row)
