"""What runs have come to, kept in one file: a finished run is never trained again."""

import json
from pathlib import Path

from ..errors import UserError, as_user_error
from ..utils.files import atomic_write
from .experiment import Experiment, Run, read_yaml

RESULTS = "results.json"


class Results:
    """The results of an experiment's runs in `results.json` of a folder, one line for each.

    Attributes:
        config: Text of the configuration, as it was when this was made.
        recipe: What all runs have in common, as it was when this was made: results by another cannot stand beside them.
        runs: What each run came to, by its key.
    """

    def __init__(self, folder: Path, experiment: Experiment) -> None:
        """Read what the folder holds already.

        Raises:
            UserError: If the file cannot be read, or holds results by another recipe.
        """
        self.path, self.experiment, self.runs = folder / RESULTS, experiment, {}
        self.config, config = read_yaml(experiment.config, "--config")
        self.recipe = {"config": config, "arguments": list(experiment.arguments)}
        if not self.path.is_file():
            return
        with as_user_error(f"{self.path} cannot be read; remove it to read the finished runs again"):
            content = json.loads(self.path.read_text())
            recipe, self.runs = content["recipe"], content["runs"]
        if _as_text(recipe) != _as_text(self.recipe):
            raise UserError(
                f"{folder} holds a comparison by another recipe (configuration or arguments); give another --out."
            )
        for run in experiment.runs:
            found = self.runs.get(run.key, {}).get("arguments", None)
            if found is not None and sorted(found) != sorted(experiment.models[run.model]):
                raise UserError(
                    f"{self.path} has {run.key} with other arguments: {' '.join(found)}; rename the model, "
                    "or give another --out."
                )
            result = self.find(run)
            missing = [metric for metric in experiment.metrics if result is not None and metric not in result["curves"]]
            if missing:
                raise UserError(f"{self.path}: {run.key} has not logged {missing[0]}.")

    def find(self, run: Run) -> dict | None:
        """Return what a run that has finished came to."""
        found = self.runs.get(run.key)
        return None if found is None or "error" in found else found

    def finished(self, model: str) -> dict[int, dict]:
        """Return what a model's finished runs came to, by seed."""
        found = {run.seed: self.find(run) for run in self.experiment.runs if run.model == model}
        return {seed: result for seed, result in found.items() if result is not None}

    def add(self, run: Run, result: dict) -> None:
        """Keep what a run came to, and write all down at once."""
        arguments = list(self.experiment.models[run.model])
        self.runs[run.key] = {"model": run.model, "seed": run.seed, "arguments": arguments} | result
        self.write()

    def write(self) -> None:
        """Write all down; the recipe too, before anything is trained by it."""
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(found)}" for key, found in self.runs.items())
        head = f'"title": {json.dumps(self.experiment.title)},\n "recipe": {_as_text(self.recipe)}'
        with atomic_write(self.path) as file:
            file.write(f'{{{head},\n "runs": {{\n{lines}\n }}}}\n'.encode())


def _as_text(recipe: dict) -> str:
    """Write a recipe as JSON: dates as text, and what is no number equal to itself."""
    return json.dumps(recipe, default=str)
