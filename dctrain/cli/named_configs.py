"""Configurations included in the package, selected by name from any folder: `--config vision/digits`."""

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError
from .safe_yaml import check_yaml_file

FOLDER = Path(__file__).parents[1] / "configs"
EXPERIMENTS = "experiments"
EXPERIMENT = "--experiment"
OPTIONS = ("--config", "-c", EXPERIMENT)  # options that take a file or a name


def find_config(name: str) -> str:
    """Resolve a file, or a name such as "vision/digits" or "configs/vision/digits.yaml", to a path.

    Anything else is returned unchanged, and the parser raises an error.
    """
    if os.path.isfile(name):  # False, rather than an error, for a configuration given as text
        return name
    for candidate in (FOLDER / name.removeprefix("configs/"), FOLDER / f"{name}.yaml"):
        if candidate.resolve().is_relative_to(FOLDER.resolve()) and os.path.isfile(candidate):
            return str(candidate)
    return name


def with_config_paths(args: list[str]) -> list[str]:
    """Replace configuration names in command-line arguments by paths, and check the files.

    Raises:
        UserError: If a file is not safe to parse.
    """
    completed = []
    for before, arg in zip(["", *args], args, strict=False):
        option, _, value = arg.partition("=")
        if before in OPTIONS:
            completed.append(_checked(before, arg))
        elif option in OPTIONS and value:
            completed.append(f"{option}={_checked(option, value)}")
        else:
            completed.append(arg)
    return completed


def _checked(option: str, name: str) -> str:
    path = find_config(name)
    if option != EXPERIMENT and Path(path).resolve().parent == (FOLDER / EXPERIMENTS).resolve():
        raise UserError(f"config={name} is an experiment: expected a configuration. Use compare --experiment {name}.")
    if os.path.isfile(path):
        check_yaml_file(Path(path))
    return path


def listing(program: str, folder: str) -> Callable[[], None]:
    """Create the subcommand `configs` of a program.

    Args:
        program: Name of the program.
        folder: Folder of its configurations.
    """

    def configs() -> None:
        """List the included configurations, which `--config` accepts by name."""
        for path in sorted((FOLDER / folder).glob("*.yaml")):
            print(f"{folder}/{path.stem:28} {_headline(path)}")
        print("\nexperiments, for compare --experiment:")
        for path in sorted((FOLDER / EXPERIMENTS).glob("*.yaml")):
            if f"python -m {program} compare" in path.read_text():
                print(f"{EXPERIMENTS}/{path.stem:28} {_headline(path)}")

    return configs


def _headline(path: Path) -> str:
    """Return the first sentence of a file's header."""
    return path.read_text().splitlines()[0].removeprefix("# ")
