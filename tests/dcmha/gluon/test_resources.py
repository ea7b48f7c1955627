"""Resources of compiled kernels: few register spills, no shared memory and no barriers."""

import json
import os
import subprocess
import sys

import pytest

from tests.dctrain.commands import ROOT

from .aot import VARIANTS

MAX_SPILLS = 96  # bytes per thread; with a register limit, more programs are faster than no spills
MAX_SPILLS_SHORT_GRADIENTS = 336  # values of two queries, most of which are not used inside the loops
SLOW = [("90", "6 heads, bidirectional"), ("90", "window_size"), ("80", "16 heads"), ("100", "16 heads")]
LONG = [("90", variant) for variant in VARIANTS if variant != "16 heads" and ("90", variant) not in SLOW]
OTHERS = [
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    *(pytest.param(*case, marks=pytest.mark.long) for case in LONG),
]


def resources(capability: str, variant: str) -> dict[str, dict[str, int]]:
    """Compile in a separate process without the Triton interpreter. Return the resources of each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.dcmha.gluon.aot", capability, variant]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=570)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(("capability", "variant"), [("90", "16 heads"), *OTHERS])
def test_kernels_use_no_shared_memory_no_barriers_and_few_spills(capability, variant):
    for name, row in resources(capability, variant).items():
        assert row["shared"] == 0 and row["barriers"] == 0, (name, row)
        most = MAX_SPILLS_SHORT_GRADIENTS if name.endswith("short_gradients") else MAX_SPILLS
        assert variant in SPILLING or row["spills"] <= most, (name, row)


SPILLING = ("rank 4",)  # gradients of more weights than fit in registers
