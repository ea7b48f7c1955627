"""Imports between the project's files: without cycles, and between packages in one direction."""

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.dctrain.commands import ROOT

MAY_IMPORT = {  # of each package: the packages below it
    "dcmha": set(),
    "dctrain": {"dcmha"},
    "dcvision": {"dcmha", "dctrain"},
    "dclm": {"dcmha", "dctrain"},
    "dcvl": {"dcmha", "dctrain", "dcvision", "dclm"},
}


@cache
def modules() -> dict[str, Path]:
    """The files of all packages by their modules' names."""
    found = {}
    for file in (file for package in MAY_IMPORT for file in (ROOT / package).rglob("*.py")):
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


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_those_below(package):
    for name in (name for name in modules() if name.split(".")[0] == package):
        others = {other.split(".")[0] for other in imported(name)} - {package}
        assert others <= MAY_IMPORT[package], name
