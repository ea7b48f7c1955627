"""Allowed imports between packages, modules and implementations."""

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
    """Return the top-level packages that a file imports, including imports inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_packages_import_only_lower_packages(package):
    files = list((ROOT / package).rglob("*.py"))
    assert len(files) > 5
    found = set().union(*map(imported_packages, files)) & MAY_IMPORT.keys()
    assert found <= MAY_IMPORT[package]
    assert package == "dcmha" or found - {package}  # checks that imports of other packages are found


@cache
def modules() -> dict[str, Path]:
    """Return the files of all packages by module name."""
    found = {}
    for file in (file for package in MAY_IMPORT for file in (ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imported_modules(name: str) -> set[str]:
    """Return the project's modules that a file imports, including imports inside functions."""
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
    """Return the modules of an import cycle; empty if there is no cycle."""
    try:
        TopologicalSorter({name: imported_modules(name) for name in modules()}).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_modules_have_no_import_cycles():
    assert len(modules()) > 200 and import_cycle() == []


IMPLEMENTATIONS = ("reference", "sdpa", "compiled", "cpu", "triton", "gluon")
MAY_USE = {"triton": {"triton", "gluon"}}  # "triton" uses the Gluon kernels for 16-bit calls


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_implementations_do_not_import_each_other(name):
    prefix = f"dcmha.impl.{name}"
    files = [one for one in modules() if one == prefix or one.startswith(f"{prefix}.")]
    assert files
    imported = set().union(*map(imported_modules, files))
    used = {one.split(".")[2] for one in imported if one.startswith("dcmha.impl.")} & set(IMPLEMENTATIONS)
    assert used <= MAY_USE.get(name, {name})


def test_shared_files_import_no_implementation():
    shared = [one for one in modules() if one.startswith("dcmha.impl.") and one.split(".")[2] not in IMPLEMENTATIONS]
    found = {
        name: {one.split(".")[2] for one in imported_modules(name) if one.startswith("dcmha.impl.")} for name in shared
    }
    used = {name: used & set(IMPLEMENTATIONS) for name, used in found.items()}
    assert {name: one for name, one in used.items() if one} == {"dcmha.impl.self_check": {"reference"}}  # compares both


@pytest.mark.slow
@pytest.mark.parametrize(
    "modules", ["dcvision.cli, dcvision.visualize", "dclm.cli, dclm.commands", "dcvl.commands.caption"]
)
def test_code_without_training_does_not_import_lightning(modules):
    """Importing Lightning takes seconds."""
    code = f"import sys, {modules}; print('lightning' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("package", ["dcvision", "dclm", "dcvl", "dctrain.explain"])
def test_lazily_imported_names_exist(package):
    module = import_module(package)
    assert set(module.__all__) <= set(dir(module)) and all(hasattr(module, name) for name in module.__all__)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        module.nothing  # noqa: B018
