"""Experiments: a recipe, models, seeds and metrics, from a YAML file or from the command line."""

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
        """Key of the run in the results."""
        return f"{self.model} | seed {self.seed}"


@dataclass(frozen=True)
class Experiment:
    """A comparison of models.

    Attributes:
        title: Title of the report.
        config: Configuration of the trainer's `fit`, the recipe of all runs.
        models: Arguments of `fit` for each model, by its name in the report.
        seeds: Seeds of weights and data; models with the same seed see the data in the same order.
        arguments: Additional arguments of `fit` for all runs.
        baseline: The model that the others are compared with.
        metrics: Logged metrics, and whether "min" or "max" is better.
        paper: Values of the first metric in the paper, by model.
        families: Models of several sizes for scaling laws, by family; the first is the baseline.
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
        """All runs, ordered by seed, so that partial results can be compared."""
        return [Run(model, seed) for seed in self.seeds for model in self.models]

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UserError: If a field is missing or invalid, or an argument is given twice or set by `compare`.
        """
        if not Path(find_config(self.config)).is_file():
            raise UserError(f"--config={self.config} does not exist; expected a YAML file of `fit`.")
        if not self.metrics:
            raise UserError("metrics is empty; expected logged metrics, each with min or max.")
        if not self.models or not all(name.strip() for name in self.models):
            raise UserError("models is empty or has an empty name; expected names of models with their arguments.")
        if (
            not self.seeds
            or len(set(self.seeds)) < len(self.seeds)
            or any(type(seed) is not int or not 0 <= seed < 2**32 for seed in self.seeds)
        ):
            raise UserError(f"seeds={list(self.seeds)} must be one or more distinct integers in [0, 2^32).")
        if self.baseline not in self.models:
            raise UserError(f"baseline={self.baseline!r} is not one of the models: {', '.join(self.models)}.")
        for name, arguments in self.models.items():
            same = next(other for other, theirs in self.models.items() if sorted(theirs) == sorted(arguments))
            if same != name:
                raise UserError(f"models {same!r} and {name!r} have the same arguments.")
        for metric, mode in self.metrics.items():
            if mode not in MODES:
                raise UserError(f"metrics: {metric}={mode!r}; expected {' or '.join(MODES)}.")
        unknown = {*self.paper, *(name for names in self.families.values() for name in names)} - set(self.models)
        if unknown:
            raise UserError(f"{sorted(unknown)[0]!r} in paper or families is not one of the models.")
        wrong = [name for name, value in self.paper.items() if type(value) not in (int, float)]
        if wrong:
            raise UserError(f"paper: {wrong[0]}={self.paper[wrong[0]]!r} is not a number.")
        _check_apart(self.arguments, "all runs", SET_PER_RUN, "it is set for each run")
        common = [name for argument in self.arguments for name in _names(argument)]
        for model, arguments in self.models.items():
            _check_apart(arguments, repr(model), SET_PER_RUN, "it is set for each run")
            _check_apart(arguments, repr(model), common, "it is given for all runs")


def _check_apart(arguments: Sequence[str], whose: str, taken: Sequence[str], why: str) -> None:
    """Check that no argument equals, contains, or is a part of a reserved one."""
    for name in (name for argument in arguments for name in _names(argument)):
        for other in taken:
            if name == other or name.startswith(f"{other}.") or other.startswith(f"{name}."):
                raise UserError(f"{name} of {whose} is not allowed: {why} ({other}).")


def _names(argument: str) -> list[str]:
    """Return the names that an argument sets: those of its parts for a mapping, none for a separate value."""
    if not argument.startswith("--"):
        return []
    name, _, value = argument.removeprefix("--").partition("=")
    return _parts(name, yaml.safe_load(value)) if value.startswith("{") else [name]


def _parts(name: str, value: object) -> list[str]:
    if not isinstance(value, dict) or not value:
        return [name]
    return [part for key, inner in value.items() for part in _parts(f"{name}.{key}", inner)]


class _Loader(yaml.SafeLoader):
    """YAML loader that rejects duplicate keys."""

    def construct_mapping(self, node, deep=False):
        """Construct a mapping."""
        keys = [str(self.construct_object(key, deep=True)) for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: str, what: str) -> tuple[str, object]:
    """Read a YAML file; return its text and content.

    Raises:
        UserError: If it cannot be read, is not YAML, or has a duplicate key.
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
        path: A YAML file with the fields of `Experiment`; `models` and `arguments` map argument names, such as
            `model.lr`, to values.
        metrics: Default metrics.
        extra: Additional arguments for all runs.

    Raises:
        UserError: If the file cannot be read, or a field is unknown, missing or invalid.
    """
    _, content = read_yaml(path, "--experiment")
    if not isinstance(content, dict):
        raise UserError(f"--experiment={path} is not a mapping of fields.")
    names = [field.name for field in fields(Experiment)]
    unknown = sorted(set(content) - set(names))
    if unknown:
        raise UserError(f"{path} has the unknown field {unknown[0]!r}; expected {', '.join(names)}.")
    for name, kind in (("config", str), ("models", dict), ("seeds", list)):
        if not isinstance(content.get(name), kind):
            raise UserError(f"{path} requires the field {name!r} of type {kind.__name__}; got {content.get(name)!r}.")
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
    """Format arguments for the command line of `fit`."""
    if not isinstance(values, dict):
        raise UserError(f"{values!r} is not a mapping of arguments to values.")
    return tuple(f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in values.items())


def experiment_of(
    config: str, models: Sequence[str], seeds: Sequence[int], metrics: dict[str, str], extra: Sequence[str]
) -> Experiment:
    """Create an experiment from the command line; models are "NAME setting=value ..." with settings of `model`."""
    models = [" ".join(model.split()) for model in models]
    twice = next((model for model in models if models.count(model) > 1), None)
    if twice is not None:
        raise UserError(f"models: {twice!r} is given twice.")
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
