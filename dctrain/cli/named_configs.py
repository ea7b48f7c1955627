"""The configurations that come with the package, by name: `--config vision/digits`, from any folder."""

import os
from collections.abc import Callable
from pathlib import Path

from ..errors import UserError
from .safe_yaml import check_yaml_file

FOLDER = Path(__file__).parents[1] / "configs"
EXPERIMENTS = "experiments"
EXPERIMENT = "--experiment"
OPTIONS = ("--config", "-c", EXPERIMENT)  # take a file or a name


def find_config(name: str) -> str:
    """Resolve a file, or a name such as "vision/digits" or "configs/vision/digits.yaml", to a path.

    What is neither is returned as it is, for the parser to refuse.
    """
    if os.path.isfile(name):  # False, not an error, for a whole configuration on the command line
        return name
    for candidate in (FOLDER / name.removeprefix("configs/"), FOLDER / f"{name}.yaml"):
        if candidate.resolve().is_relative_to(FOLDER.resolve()) and os.path.isfile(candidate):
            return str(candidate)
    return name


def with_config_paths(args: list[str]) -> list[str]:
    """Replace the names of configurations among the arguments of a command by paths, and check the files.

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
    """Make the subcommand `configs` of a program.

    Args:
        program: Its name.
        folder: Where its configurations lie.
    """

    def configs() -> None:
        """List the configurations that come with the package: what `--config` takes by name."""
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
