"""The C++ source compiled for other vector widths and with the sanitizers of the compiler."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SHORT = ("-k", "test_equals_the_reference or anywhere or different_ranks or bias or cache")
OF_X86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="options of x86-64")


def fails(compiler: str, **environment: str) -> str:
    """Run the operator's tests in another process with this compiler. Return the output if a test fails, or ""."""
    own = {"CXX": compiler, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", "slow or not slow", *SHORT]
    command += ["tests/dcmha/cpu/test_operator.py"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | own | environment, capture_output=True, text=True)
    return "" if done.returncode == 0 else (done.stdout[-3000:] + done.stderr[-3000:] or f"status {done.returncode}")


@pytest.mark.long
@pytest.mark.parametrize("options", ["-mno-avx512f", "-mno-avx"])
@OF_X86
def test_operator_tests_pass_with_other_vector_widths(options):
    assert not fails(f"g++ {options}")


@pytest.mark.long
@OF_X86
def test_operator_tests_pass_with_address_and_undefined_behavior_sanitizers():
    libraries = (["g++", f"-print-file-name={name}"] for name in ("libasan.so", "libstdc++.so.6"))
    paths = (subprocess.run(command, capture_output=True, text=True).stdout.strip() for command in libraries)
    sanitizers = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer"
    assert not fails(f"g++ {sanitizers}", LD_PRELOAD=" ".join(paths), ASAN_OPTIONS="detect_leaks=0")
