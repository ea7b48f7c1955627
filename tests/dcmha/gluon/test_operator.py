"""The operator, from the public function to the Gluon kernels: output and every gradient against float64.

`tests/ptx` executes the kernels. It also raises an error for out-of-bounds or misaligned accesses and for races.
"""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.dctrain.commands import ROOT

from .cases import CASES, LONG, QUICK, SLOW

MAX_USUAL = 0.02  # maximum error of the reference in a 16-bit dtype; a larger one means that the problems differ


def solve(*names: str) -> dict[str, dict[str, tuple[float, float]]]:
    """Solve problems in a separate process without the Triton interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.dcmha.gluon.solve", *names]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=570)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def groups(names: list[str], size: int) -> list[list[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]


@pytest.mark.parametrize(
    "names",
    [
        *groups(list(QUICK), 2),
        *(pytest.param(names, marks=pytest.mark.slow) for names in groups(list(SLOW), 4)),
        *(pytest.param(names, marks=pytest.mark.long) for names in groups(list(LONG), 4)),
    ],
    ids=", ".join,
)
def test_error_is_at_most_twice_that_of_the_reference_in_the_same_dtype(names):
    for name, found in solve(*names).items():
        eps = torch.finfo(CASES[name].dtype).eps
        for tensor, (error, usual) in found.items():
            assert usual < MAX_USUAL and error < 2 * usual + eps, (name, tensor)
