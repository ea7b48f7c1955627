"""`public_api.py`, the input of the type checker, uses every exported name."""

import ast
from importlib import import_module
from pathlib import Path

import pytest

TREE = ast.parse(Path(__file__).with_name("public_api.py").read_text())
NAMES = {node.id for node in ast.walk(TREE) if isinstance(node, ast.Name)}
ATTRIBUTES = {node.attr for node in ast.walk(TREE) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("package", ["dcmha", "dcmha.analysis", "dcvision", "dclm", "dcvl"])
def test_all_exported_names_are_used(package):
    exported = set(import_module(package).__all__)
    assert exported and exported - NAMES - ATTRIBUTES == set()
