"""The trainers do not know each other."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(("package", "other"), [("dcvision", "dclm"), ("dclm", "dcvision")])
def test_the_trainers_stand_apart(package, other):
    code = f"import sys, {package}; print({other!r} in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "False", result.stderr
