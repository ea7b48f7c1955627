"""Results of an evaluation with their provenance, in a JSON file that is extended measurement by measurement."""

import csv
import io
import json
import zlib
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from ..errors import UserError, as_user_error
from ..utils.environment import environment
from ..utils.files import atomic_write, write_json

FORMAT = "dcmha-evaluation-1"
PARTS = {"model", "checkpoint", "identity", "parameters", "environment", "results"}
QUESTIONS = "questions"  # unit of tasks; summaries of several tasks have a different unit


class Measure(NamedTuple):
    """One number.

    Attributes:
        name: What is measured, such as a data set.
        metric: Name of the metric.
        value: The number.
        stderr: Its standard error; None if unknown.
        higher_is_better: Whether a higher value is better.
        count: Number of tokens, bytes, questions or images.
        unit: What `count` counts.
        is_detail: Whether it is omitted from the printed table.
    """

    name: str
    metric: str
    value: float
    stderr: float | None
    higher_is_better: bool
    count: int
    unit: str
    is_detail: bool = False


class EvaluationResults:
    """Results of one model.

    Attributes:
        model: Name of the model.
        content: Content of the file: description of model and environment, and under "results" the settings, numbers
            and an optional note of each measurement.
    """

    def __init__(self, content: dict) -> None:
        self.content, self.model = content, content["model"]

    @property
    def measures(self) -> list[Measure]:
        """All numbers."""
        return [Measure(**measure) for entry in self.content["results"].values() for measure in entry["measures"]]

    def has(self, title: str, settings: dict) -> bool:
        """Whether there is a measurement with these settings."""
        return self.content["results"].get(title, {}).get("settings") == as_json(settings)

    def add(self, title: str, settings: dict, measures: Sequence[Measure], note: str | None) -> None:
        """Add a measurement."""
        entry = {"settings": settings, "note": note, "measures": [measure._asdict() for measure in measures]}
        self.content["results"][title] = as_json(entry)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_json(path, self.content)


def describe(name: str, checkpoint: str, model: nn.Module, **more: object) -> dict:
    """Describe a model and its environment; `more` is everything else that its numbers depend on.

    Returns:
        The content of a file without results. "identity" must be equal for results to belong to the same model.
    """
    weight = next(model.parameters())
    identity = {"weights_crc32": checksum(model), "dtype": str(weight.dtype).removeprefix("torch."), **more}
    return {
        "format": FORMAT,
        "model": name,
        "checkpoint": checkpoint,
        "identity": as_json(identity),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "environment": environment(weight.device) | {"dcmha": version("dcmha")},
        "results": {},
    }


def checksum(model: nn.Module) -> int:
    """Compute a CRC-32 of all weights, independent of their device."""
    total = 0
    for weight in model.state_dict().values():
        data = weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        total = zlib.crc32(data.numpy(), total)
    return total


def open_results(path: Path, described: dict) -> EvaluationResults:
    """Continue the file of the same model, or create one.

    Raises:
        UserError: If the file belongs to a different model, or is damaged.
    """
    if not path.is_file():
        return EvaluationResults(described)
    found = read_results(path).content
    theirs, ours = found["identity"], described["identity"]
    others = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    if others:
        raise UserError(f"{path} belongs to a different model: {', '.join(others)} differ; use another out.")
    return EvaluationResults(described | {"results": found["results"]})


def read_results(path: Path) -> EvaluationResults:
    """Read a results file.

    Raises:
        UserError: If it is not a results file.
    """
    if not path.is_file():
        raise UserError(f"{path} does not exist; expected a JSON file written by `evaluate`.")
    with as_user_error(f"{path} is not JSON"):
        content = json.loads(path.read_text())
    if not isinstance(content, dict) or content.get("format") != FORMAT or content.keys() < PARTS:
        raise UserError(f"{path} is not a result of `evaluate`.")
    with as_user_error(f"{path} is not a result of `evaluate`"):
        return _checked(EvaluationResults(content))


def _checked(results: EvaluationResults) -> EvaluationResults:
    """Check the fields that are used later.

    Raises:
        ValueError: If a value has the wrong type.
        Exception: Various types, if a field is missing or malformed.
    """
    content = results.content
    for name, kind in {"model": str, "checkpoint": str, "identity": dict, "environment": dict, "results": dict}.items():
        if not isinstance(content[name], kind):
            raise ValueError(f"{name}={content[name]!r} is not a {kind.__name__}.")
    identity, where = content["identity"], content["environment"]
    _ = (identity["weights_crc32"], identity["dtype"], where["commit"], where["torch"])
    for title, entry in content["results"].items():
        if not isinstance(entry["settings"], dict):
            raise ValueError(f"the settings of {title!r} are not a dict.")
    for measure in results.measures:
        numbers = (measure.value, *([] if measure.stderr is None else [measure.stderr]), measure.count)
        if not all(type(number) in (int, float) for number in numbers):
            raise ValueError(f"{measure.name!r} has {numbers}, which are not all numbers.")
    return results


def write_csv(path: Path, models: Iterable[EvaluationResults]) -> None:
    """Write one line per number and model."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("model", "checkpoint", "weights_crc32", "dtype", "commit", "torch", *Measure._fields))
    for results in models:
        identity, where = results.content["identity"], results.content["environment"]
        origin = (identity["weights_crc32"], identity["dtype"], where["commit"], where["torch"])
        head = (results.model, results.content["checkpoint"], *origin)
        writer.writerows((*head, *measure) for measure in results.measures)
    with atomic_write(path) as file:
        file.write(text.getvalue().encode())


def as_json(content: dict) -> dict:
    """Convert content to the form in which it is read back."""
    return json.loads(json.dumps(content))
