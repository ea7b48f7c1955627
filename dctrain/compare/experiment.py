"""What is compared: a recipe, models, seeds, and by which metrics; from a YAML file or from the command line."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from ..cli.named_configs import find_config
from ..cli.safe_yaml import check_yaml_file
from ..errors import UserError

SET_PER_RUN = (
    *("config", "name", "resume", "seed_everything", "data.seed"),
    *("trainer.default_root_dir", "trainer.logger"),
)
MODES = ("min", "max")


@dataclass(frozen=True)
class Run:
    """A model and a seed."""

    model: str
    seed: int

    @property
    def key(self) -> str:
        """Name it among the results."""
        return f"{self.model} | seed {self.seed}"


@dataclass(frozen=True)
class Experiment:
    """What is compared.

    Attributes:
        title: What the report is headed with.
        config: A configuration of the trainer's `fit`, the recipe of all runs.
        models: For each model, by the name that the report gives it, arguments of `fit` in which it differs.
        seeds: Of weights and data; models share the order of the data of a seed.
        arguments: More arguments of `fit`, for all runs.
        baseline: The model that differences are to.
        metrics: What counts: logged curves, and whether "min" or "max" of them is better.
        paper: What the paper reports of the first metric, by model.
        families: Models of several sizes that a scaling law is fitted to, by family, the baseline's first.
    """

    title: str
    config: str
    models: dict[str, tuple[str, ...]]
    seeds: tuple[int, ...]
    arguments: tuple[str, ...]
    baseline: str
    metrics: dict[str, str]
    paper: dict[str, float]
    families: dict[str, list[str]]

    @property
    def runs(self) -> list[Run]:
        """List what is trained, seed by seed: what is done first can be compared."""
        return [Run(model, seed) for seed in self.seeds for model in self.models]

    def __post_init__(self) -> None:
        """Check it.

        Raises:
            UserError: If something is missing, stands twice, or is set for each run.
        """
        if not Path(find_config(self.config)).is_file():
            raise UserError(f"--config={self.config} does not exist; expected a YAML file of `fit`.")
        if not self.metrics:
            raise UserError("metrics holds none; expected logged curves, each with min or max.")
        if not self.models or not all(name.strip() for name in self.models):
            raise UserError("models holds none, or an empty name; expected names of models, with what they differ in.")
        if (
            not self.seeds
            or len(set(self.seeds)) < len(self.seeds)
            or any(type(seed) is not int or not 0 <= seed < 2**32 for seed in self.seeds)
        ):
            raise UserError(f"seeds={list(self.seeds)} must be at least one, different whole numbers in [0, 2^32).")
        if self.baseline not in self.models:
            raise UserError(f"baseline={self.baseline!r} is none of the models: {', '.join(self.models)}.")
        for name, arguments in self.models.items():
            same = next(other for other, theirs in self.models.items() if sorted(theirs) == sorted(arguments))
            if same != name:
                raise UserError(f"models {same!r} and {name!r} are the same run twice.")
        for metric, mode in self.metrics.items():
            if mode not in MODES:
                raise UserError(f"metrics: {metric}={mode!r}; expected {' or '.join(MODES)}.")
        unknown = {*self.paper, *(name for names in self.families.values() for name in names)} - set(self.models)
        if unknown:
            raise UserError(f"{sorted(unknown)[0]!r}, of paper or families, is none of the models.")
        wrong = [name for name, value in self.paper.items() if type(value) not in (int, float)]
        if wrong:
            raise UserError(f"paper: {wrong[0]}={self.paper[wrong[0]]!r} is no number.")
        _check_apart(self.arguments, "all runs", SET_PER_RUN, "it is set for each run")
        common = [name for argument in self.arguments for name in _names(argument)]
        for model, arguments in self.models.items():
            _check_apart(arguments, repr(model), SET_PER_RUN, "it is set for each run")
            _check_apart(arguments, repr(model), common, "it is given for all runs")


def _check_apart(arguments: Sequence[str], whose: str, taken: Sequence[str], why: str) -> None:
    """Check that no argument is one that is taken, holds one, or is a part of one."""
    for name in (name for argument in arguments for name in _names(argument)):
        for other in taken:
            if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}."):
                raise UserError(f"{name}, of {whose}, cannot be given: {why} ({other}).")


def _names(argument: str) -> list[str]:
    """Name what an argument sets: a mapping each of its parts, a value that stands by itself nothing."""
    if not argument.startswith("--"):
        return []
    name, _, value = argument.removeprefix("--").partition("=")
    return _parts(name, yaml.safe_load(value)) if value.startswith("{") else [name]


def _parts(name: str, value: object) -> list[str]:
    if not isinstance(value, dict) or not value:
        return [name]
    return [part for key, inner in value.items() for part in _parts(f"{name}.{key}", inner)]


class _Loader(yaml.SafeLoader):
    """Reads YAML, and refuses a key that stands twice."""

    def construct_mapping(self, node, deep=False):
        """Make a mapping."""
        keys = [str(self.construct_object(key, deep=True)) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: str, what: str) -> tuple[str, object]:
    """Read a YAML file: its text and its content.

    Raises:
        UserError: If it cannot be read, is no YAML, or has a key twice.
    """
    found = Path(find_config(path))
    try:
        if found.is_file():
            check_yaml_file(found)
        text = found.read_text()
        return text, yaml.load(text, _Loader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{what}={path} cannot be read: {' '.join(str(error).split())}") from error


def read_experiment(path: str, metrics: dict[str, str], extra: Sequence[str] = ()) -> Experiment:
    """Read an experiment.

    Args:
        path: A YAML file whose fields are those of `Experiment`; `models` and `arguments` map names of arguments, such
            as `model.lr`, to values.
        metrics: What counts where the file does not say it.
        extra: More arguments for all runs.

    Raises:
        UserError: If the file cannot be read, has an unknown field or lacks one, or is no experiment.
    """
    _, content = read_yaml(path, "--experiment")
    if not isinstance(content, dict):
        raise UserError(f"--experiment={path} is no mapping of fields.")
    names = [field.name for field in fields(Experiment)]
    unknown = sorted(set(content) - set(names))
    if unknown:
        raise UserError(f"{path} has the unknown field {unknown[0]!r}; expected {', '.join(names)}.")
    for name, kind in (("config", str), ("models", dict), ("seeds", list)):
        if not isinstance(content.get(name), kind):
            raise UserError(f"{path} must have the field {name!r}, a {kind.__name__}; got {content.get(name)!r}.")
    for name in ("arguments", "metrics", "paper", "families"):
        if not isinstance(content.get(name, {}), dict):
            raise UserError(f"{path}: {name}={content[name]!r} must be a dict.")
    models = {str(name): _arguments(what) for name, what in content["models"].items()}
    return Experiment(
        title=str(content.get("title", Path(path).stem)),
        config=content["config"],
        models=models,
        seeds=tuple(content["seeds"]),
        arguments=(*_arguments(content.get("arguments", {})), *extra),
        baseline=str(content.get("baseline", next(iter(models), ""))),
        metrics=content.get("metrics", metrics),
        paper={str(name): value for name, value in content.get("paper", {}).items()},
        families={str(name): list(map(str, of)) for name, of in content.get("families", {}).items()},
    )


def _arguments(values: dict) -> tuple[str, ...]:
    """Write arguments as `fit` takes them."""
    if not isinstance(values, dict):
        raise UserError(f"{values!r} is no mapping of arguments to values.")
    return tuple(f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items())


def experiment_of(
    config: str, models: Sequence[str], seeds: Sequence[int], metrics: dict[str, str], extra: Sequence[str]
) -> Experiment:
    """Make an experiment of what the command line says: "NAME setting=value ..." are models and settings of `model`."""
    models = [" ".join(model.split()) for model in models]
    twice = next((model for model in models if models.count(model) > 1), None)
    if twice is not None:
        raise UserError(f"models: {twice!r} stands twice.")
    return Experiment(
        title=Path(config).stem,
        config=config,
        models={model: _of_shorthand(model) for model in models},
        seeds=tuple(seeds),
        arguments=tuple(extra),
        baseline=models[0] if models else "",
        metrics=metrics,
        paper={},
        families={},
    )


def _of_shorthand(model: str) -> tuple[str, ...]:
    name, *settings = re.split(r" (?=[\w.]+=)", model)
    return f"--model.model={name}", *(f"--model.{setting}" for setting in settings)
