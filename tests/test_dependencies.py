"""Dependencies: no accepted version has a known vulnerability, and `constraints.txt` pins the tested versions.

`advisories.json` lists the published advisories of each direct dependency and the versions that fix them. Review the
file when you add or upgrade a dependency.
"""

import json
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
ADVISORIES = json.loads((Path(__file__).parent / "advisories.json").read_text())
FIXED = {canonicalize_name(name): fixes for name, fixes in ADVISORIES["fixed"].items()}


def direct_requirements() -> list[Requirement]:
    """Return the requirements of the project and its extras, without the project itself."""
    listed = [*PROJECT["dependencies"], *(one for extra in PROJECT["optional-dependencies"].values() for one in extra)]
    return [one for one in map(Requirement, listed) if one.name != PROJECT["name"]]


def constraints() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(pin.name): Version(next(iter(pin.specifier)).version) for pin in pins}


@pytest.mark.parametrize("requirement", direct_requirements(), ids=str)
def test_no_accepted_version_has_a_known_vulnerability(requirement):
    name = canonicalize_name(requirement.name)
    reviewed = FIXED.keys() | set(map(canonicalize_name, ADVISORIES["none_known"]))
    assert name in reviewed, f"{name} is not reviewed in tests/advisories.json"
    floors = [Version(one.version) for one in requirement.specifier if one.operator == ">="]
    for advisory, fixed in FIXED.get(name, {}).items():
        assert max(floors, default=Version("0")) >= Version(fixed), f"{requirement} accepts {advisory}"


@pytest.mark.parametrize("requirement", direct_requirements(), ids=str)
def test_constraints_pin_accepted_versions(requirement):
    pinned = constraints()[canonicalize_name(requirement.name)]
    assert requirement.specifier.contains(pinned)


def test_installed_versions_have_no_known_vulnerability():
    installed = {name: Version(version(name)) for name in FIXED}
    assert {name for name, fixes in FIXED.items() if installed[name] < max(map(Version, fixes.values()))} == set()
