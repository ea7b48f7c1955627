"""The package stands alone: it needs torch and nothing of the trainer."""

import subprocess
import sys

import pytest

import dcmha


def test_imports_torch_alone():
    forbidden = ("timm", "lightning", "torchvision", "webdataset", "safetensors", "dctrain", "dcvision", "dclm")
    code = f"import sys, dcmha; print([name for name in {forbidden} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "[]", result.stderr


@pytest.mark.parametrize(("package", "other"), [("dcvision", "dclm"), ("dclm", "dcvision")])
def test_the_trainers_stand_apart(package, other):
    code = f"import sys, {package}; print({other!r} in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "False", result.stderr


def test_everything_exported_exists():
    assert all(hasattr(dcmha, name) for name in dcmha.__all__)
