"""Results of runs in one file; a finished run is not repeated."""

import json
from pathlib import Path

from ..errors import UserError, as_user_error
from ..utils.files import atomic_write
from .experiment import Experiment, Run, read_yaml

RESULTS = "results.json"


class ComparisonResults:
    """Results of an experiment's runs, stored in `results.json` of a folder, one line per run.

    Attributes:
        config: Text of the configuration when the results were created.
        recipe: Common settings of all runs when the results were created; results of a different recipe are rejected.
        runs: Result of each run by its key.
    """

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        """Read existing results of the folder.

        Raises:
            UserError: If the file cannot be read, or has results of a different recipe.
        """
        self.path, self.experiment, self.runs = folder / RESULTS, experiment, {}
        self.config, config = read_yaml(experiment.config, "--config")
        self.recipe = {"config": config, "arguments": list(experiment.arguments)}
        if not self.path.is_file():
            return
        with as_user_error(f"{self.path} cannot be read; remove it to recreate it from the finished runs"):
            content = json.loads(self.path.read_text())
            recipe, self.runs = content["recipe"], content["runs"]
        if _as_text(recipe) != _as_text(self.recipe):
            raise UserError(
                f"{folder} has a comparison with a different recipe (configuration or arguments); use another --out."
            )
        for run in experiment.runs:
            found = self.runs.get(run.key, {}).get("arguments", None)
            if found is not None and sorted(found) != sorted(experiment.models[run.model]):
                raise UserError(
                    f"{self.path} has {run.key} with different arguments: {' '.join(found)}; rename the model, "
                    "or use another --out."
                )
            result = self.find(run)
            missing = [metric for metric in experiment.metrics if result is not None and metric not in result["curves"]]
            if missing:
                raise UserError(f"{self.path}: {run.key} has not logged {missing[0]}.")

    def find(self, run: Run) -> dict | None:
        """Return the result of a finished run; None otherwise."""
        found = self.runs.get(run.key)
        return None if found is None or "error" in found else found

    def finished(self, model: str) -> dict[int, dict]:
        """Return the results of a model's finished runs by seed."""
        found = {run.seed: self.find(run) for run in self.experiment.runs if run.model == model}
        return {seed: result for seed, result in found.items() if result is not None}

    def add(self, run: Run, result: dict) -> None:
        """Add the result of a run, and write the file."""
        arguments = list(self.experiment.models[run.model])
        self.runs[run.key] = {"model": run.model, "seed": run.seed, "arguments": arguments} | result
        self.write()

    def write(self) -> None:
        """Write the file, including the recipe, even before any run is finished."""
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(found)}" for key, found in self.runs.items())
        head = f'"title": {json.dumps(self.experiment.title)},\n "recipe": {_as_text(self.recipe)}'
        with atomic_write(self.path) as file:
            file.write(f'{{{head},\n "runs": {{\n{lines}\n }}}}\n'.encode())


def _as_text(recipe: dict) -> str:
    """Format a recipe as JSON: dates as text, NaN comparable."""
    return json.dumps(recipe, default=str)
