"""GPU resources of the kernels, compiled ahead of time: limits of registers, spills and shared memory."""

import json
import os
import subprocess
import sys

import pytest

from tests.dctrain.commands import ROOT

from .aot import DECODING, VARIANTS

MAX_SHARED = 99 * 1024  # per block, on GPUs with the least shared memory
MAX_REGISTERS = 168  # per thread, for kernels with a register limit: 12 warps fit on a multiprocessor
MAX_SPILLS_OF_CAPPED = 384  # bytes per thread; on an H100, fewer registers are faster than no spills
MAX_SPILLS = {"24 heads": 512, "32 heads": 512, "40 heads": 1024, "52 heads": 1536}  # of other kernels
MAX_SPILLS_OF_OTHERS = {1: 96, 2: 512}  # by number of blocks of heads
HEADS = [name for name in VARIANTS if name.endswith("heads") and "," not in name]
OTHERS = [("90", name) for name in VARIANTS if name not in ("16 heads", "32 heads")]
OTHERS += [(capability, name) for capability in ("80", "100") for name in HEADS]


def resources(capability: str, *variants: str) -> dict[str, dict[str, int]]:
    """Compile in a separate process without the Triton interpreter. Return the resources of each kernel."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.dcmha.triton.aot", capability, *variants]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=570)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def assert_fits(variant: str, rows: dict[str, dict[str, int]]) -> None:
    blocks = 1 if VARIANTS[variant].get("HEADS", 16) <= 16 else 2
    for name, row in rows.items():
        most = MAX_SPILLS.get(variant, MAX_SPILLS_OF_OTHERS[blocks])
        if row["registers"] <= MAX_REGISTERS:
            most = MAX_SPILLS_OF_CAPPED
        assert row["spills"] <= most and row["shared"] <= MAX_SHARED, (name, row)


@pytest.mark.long
@pytest.mark.parametrize("variant", ["16 heads", "32 heads"])
def test_resources_for_heads_of_named_models_are_within_limits(variant):
    """The tiles of 16 heads, which were chosen by timing, also allow 12 warps per multiprocessor."""
    rows = resources("90", variant)
    assert_fits(variant, rows)
    assert len(rows) == 5
    if variant == "16 heads":
        assert all(row["registers"] <= MAX_REGISTERS for row in rows.values()), rows


@pytest.mark.long
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_decoding_kernels_are_bound_by_memory(capability):
    """Kernels issue fewer instructions than fit in the memory time of an H100: 14 bytes per clock and 128 lanes."""
    for variant, options in DECODING.items():
        itemsize = 4 if options.get("dtype") == "fp32" else 2
        for name, row in resources(capability, variant).items():
            assert row["spills"] <= 640 and row["shared"] <= MAX_SHARED, (name, row)
            if "num_queries" not in options:
                assert row["instructions"] < options.get("head_dim", 128) * itemsize * 128 / 14, (name, row)


@pytest.mark.long
@pytest.mark.parametrize(("capability", "variant"), OTHERS)
def test_resources_of_other_configurations_are_within_limits(capability, variant):
    assert_fits(variant, resources(capability, variant))
