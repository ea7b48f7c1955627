"""Imports between the project's files have no cycles."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.dctrain.commands import ROOT

PACKAGES = ("dcmha", "dctrain", "dcvision", "dclm", "dcvl")


@cache
def modules() -> dict[str, Path]:
    """The files of all packages by their modules' names."""
    found = {}
    for file in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported(name: str) -> set[str]:
    """The project's modules that a file imports, inside of functions too."""
    file, found = modules()[name], set()
    package = name.split(".") if file.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in modules() else base for alias in node.names}
    return found & modules().keys() - {name}


def test_no_file_imports_itself_through_others():
    try:
        TopologicalSorter({name: imported(name) for name in modules()}).prepare()
    except CycleError as error:
        pytest.fail(f"cycle of imports: {' <- '.join(error.args[1])}")
