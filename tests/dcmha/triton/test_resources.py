"""What the kernels take of a GPU, compiled ahead of time: few spills, little shared memory, room for many warps."""

import json
import os
import subprocess
import sys

import pytest

from tests.dctrain.commands import ROOT

from .aot import DECODING, VARIANTS

MAX_SHARED = 99 * 1024  # of a block, on GPUs that have least
MAX_REGISTERS = 168  # of a thread of kernels that are capped: 12 warps fit a multiprocessor
MAX_SPILLS_OF_CAPPED = 384  # bytes of a thread; on an H100 fewer registers are worth more than no spills
MAX_SPILLS = {"24 heads": 512, "32 heads": 512, "40 heads": 1024, "52 heads": 1536}  # of the others
MAX_SPILLS_OF_OTHERS = {1: 96, 2: 512}  # by blocks
HEADS = [name for name in VARIANTS if name.endswith("heads") and "," not in name]
OTHERS = [("90", name) for name in VARIANTS if name not in ("16 heads", "32 heads")]
OTHERS += [(capability, name) for capability in ("80", "100") for name in HEADS]


def resources(capability: str, *variants: str) -> dict[str, dict[str, int]]:
    """Compile in a process of its own, without the interpreter."""
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
def test_heads_of_named_models(variant):
    """The tiles of 16 heads, which were timed, let 12 warps into a multiprocessor too."""
    rows = resources("90", variant)
    assert_fits(variant, rows)
    assert len(rows) == 5
    if variant == "16 heads":
        assert all(row["registers"] <= MAX_REGISTERS for row in rows.values()), rows


@pytest.mark.long
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_decoding_is_bound_by_memory(capability):
    """Kernels issue no more than what an H100's memory leaves time for: 14 bytes a clock of 128 lanes."""
    for variant, options in DECODING.items():
        itemsize = 4 if options.get("dtype") == "fp32" else 2
        for name, row in resources(capability, variant).items():
            assert row["spills"] <= 640 and row["shared"] <= MAX_SHARED, (name, row)
            if "num_queries" not in options:
                assert row["instructions"] < options.get("head_dim", 128) * itemsize * 128 / 14, (name, row)


@pytest.mark.long
@pytest.mark.parametrize(("capability", "variant"), OTHERS)
def test_other_configurations(capability, variant):
    assert_fits(variant, resources(capability, variant))
