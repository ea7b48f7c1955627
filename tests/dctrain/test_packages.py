"""Arrows point one way: what may import what."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "dcmha": {"dcmha"},
    "dctrain": {"dcmha", "dctrain"},
    "dcvision": {"dcmha", "dctrain", "dcvision"},
    "dclm": {"dcmha", "dctrain", "dclm"},
    "dcvl": {"dcmha", "dctrain", "dcvision", "dclm", "dcvl"},
}


def imported_packages(path: Path) -> set[str]:
    """The top-level packages that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_those_below_them(package):
    files = list((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    found = set().union(*map(imported_packages, files)) & MAY_IMPORT.keys()
    assert found <= MAY_IMPORT[package]
    assert package == "dcmha" or found - {package}  # the names are found at all


@cache
def modules() -> dict[str, Path]:
    """The files of all packages by their modules' names."""
    found = {}
    for file in (file for package in MAY_IMPORT for file in (ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported_modules(name: str) -> set[str]:
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


def import_cycle() -> list[str]:
    """Modules that import each other in a circle; empty if there are none."""
    try:
        TopologicalSorter({name: imported_modules(name) for name in modules()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_files_import_each_other_without_cycles():
    assert len(modules()) > 200 and import_cycle() == []


IMPLEMENTATIONS = ("reference", "sdpa", "compiled", "cpu", "triton", "gluon")
MAY_USE = {"triton": {"triton", "gluon"}}  # "triton" runs 16-bit calls by the Gluon kernels


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_implementations_do_not_import_each_other(name):
    prefix = f"dcmha.impl.{name}"
    files = [one for one in modules() if one == prefix or one.startswith(f"{prefix}.")]
    assert files
    imported = set().union(*map(imported_modules, files))
    used = {one.split(".")[2] for one in imported if one.startswith("dcmha.impl.")} & set(IMPLEMENTATIONS)
    assert used <= MAY_USE.get(name, {name})


def test_shared_files_of_implementations_import_none_of_them():
    shared = [one for one in modules() if one.startswith("dcmha.impl.") and one.split(".")[2] not in IMPLEMENTATIONS]
    found = {
        name: {one.split(".")[2] for one in imported_modules(name) if one.startswith("dcmha.impl.")} for name in shared
    }
    used = {name: used & set(IMPLEMENTATIONS) for name, used in found.items()}
    assert {name: one for name, one in used.items() if one} == {"dcmha.impl.self_check": {"reference"}}  # it compares


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules", ["dcvision.cli, dcvision.visualize", "dclm.cli, dclm.commands", "dcvl.commands.caption"]
)
def test_what_does_not_train_does_without_lightning(modules):
    """Importing it takes seconds."""
    code = f"import sys, {modules}; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("package", ["dcvision", "dclm", "dcvl", "dctrain.explain"])
def test_names_that_are_imported_late(package):
    module = import_module(package)
    assert set(module.__all__) <= set(dir(module)) and all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018
