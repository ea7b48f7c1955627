"""Evaluation of several models: existing measurements are kept, new ones are written immediately."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import torch

from ..errors import UserError, as_user_error
from ..utils.files import atomic_write, file_lock, relative
from .answer_cache import AnswerCache
from .ranks import EvaluationRanks, init_ranks
from .results import EvaluationResults, Measure, open_results, read_results, write_csv
from .table import evaluation_table

OUT = "evaluation"
MAX_STEPS = 1024  # maximum points of an integral
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Subject = TypeVar("Subject", contravariant=True)


class Measurable(Protocol[Subject]):
    """A measurement of a subject: a model with everything it needs to be evaluated."""

    @property
    def title(self) -> str:
        """Unique title."""

    def settings(self, subject: Subject) -> dict:
        """Settings that the numbers depend on, other than the model."""

    def run(self, subject: Subject) -> tuple[list[Measure], str | None]:
        """Measure; return the numbers and an optional note."""


class Evaluation(NamedTuple):
    """Evaluation of one model.

    Attributes:
        name: Name of the model.
        folder: Folder of the results.
        measures: The measurements.
        ranks: Ranks that share the work.
    """

    name: str
    folder: Path
    measures: Sequence[Measurable]
    ranks: EvaluationRanks

    def run(self, described: dict, make_subject: Callable[[AnswerCache], object]) -> EvaluationResults:
        """Run all missing measurements.

        Args:
            described: Result of `describe`.
            make_subject: Creates the subject, given a cache of its answers.

        Raises:
            UserError: If there are results of a different model under this name, or another process is writing them.
        """
        with self._held():
            return self._run(described, make_subject)

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Hold the lock of the model's results."""
        if not self.ranks.is_first:
            yield
            return
        path = self.folder / f".{self.name}.lock"
        with file_lock(path, f"{self.folder / self.name}.json is being written by another evaluation."):
            try:
                yield
            finally:
                path.unlink()

    def _run(self, described: dict, make_subject: Callable[[AnswerCache], object]) -> EvaluationResults:
        path = self.folder / f"{self.name}.json"
        results = self.ranks.gather(open_results(path, described))[0]  # one rank's view, in case their disks differ
        with _open_answer_cache(self.folder, self.name, described["identity"], self.ranks) as journal:
            subject = make_subject(journal)
            for measure in self.measures:
                settings = measure.settings(subject)
                if self.ranks.gather(results.has(measure.title, settings))[0]:
                    continue
                numbers, note = measure.run(subject)
                results.add(measure.title, settings, numbers, note)
                if self.ranks.is_first:
                    results.write(path)
                    print(f"{self.name}: {measure.title} measured{f'; {note}' if note else ''}", flush=True)
        return results


@contextmanager
def _open_answer_cache(folder: Path, name: str, identity: dict, ranks: EvaluationRanks) -> Iterator[AnswerCache]:
    """Cache answers until all measurements are done."""
    journal = AnswerCache(folder, name, identity, ranks)
    is_done = False
    try:
        yield journal
        is_done = True
    finally:
        journal.close(is_done)


def measure_models(
    checkpoints: Sequence[str],
    measures: Sequence[Measurable],
    compare: Sequence[str],
    out: str | None,
    measure: Callable[[str, Evaluation], EvaluationResults],
    show: Callable[[Sequence[EvaluationResults], Path | None], None] | None = None,
) -> None:
    """Evaluate models sequentially, together with the other ranks, and report the results.

    Args:
        checkpoints: The models.
        measures: The measurements.
        compare: Results of earlier evaluations, the first columns of the table.
        out: Folder of the results; `OUT` if None, and none if no model is evaluated.
        measure: Loads one model and runs its evaluation.
        tell: Reports all results, given the folder if there is one; `report` if None.

    Raises:
        UserError: If results or models cannot be read, or as in `Evaluation.run`.
    """
    earlier = [read_results(Path(path)) for path in compare]
    folder, found = Path(out or OUT), []
    with init_ranks() as ranks:
        for checkpoint, name in zip(checkpoints, name_models(checkpoints), strict=True):
            folder.mkdir(parents=True, exist_ok=True)
            found.append(measure(checkpoint, Evaluation(name, folder, measures, ranks)))
        if ranks.is_first:
            is_written = out is not None or len(checkpoints) > 0
            if is_written:
                folder.mkdir(parents=True, exist_ok=True)
            (show or report)([*earlier, *found], folder if is_written else None)


def find_dtype(name: str | None) -> torch.dtype | None:
    """Return the dtype with a name; None for None.

    Raises:
        UserError: If the name is unknown.
    """
    if name is not None and name not in DTYPES:
        raise UserError(f"dtype={name!r}; expected {', '.join(DTYPES)}.")
    return DTYPES.get(name)


def check_asked(models: Sequence[str], asked: Sequence[str], compare: Sequence[str], what: str) -> None:
    """Check that there are models and measurements, or results to compare.

    Raises:
        UserError: If not.
    """
    if asked and not models:
        raise UserError("checkpoint=[]: expected at least one model.")
    if not models and not compare:
        raise UserError("checkpoint: expected at least one model, or results of earlier evaluations in compare.")
    if models and not asked:
        raise UserError(f"nothing to measure; expected {what}.")


def check_at_least_one(**numbers: int | None) -> None:
    """Raise UserError if a number is less than 1; None is accepted."""
    for name, number in numbers.items():
        if number is not None and number < 1:
            raise UserError(f"{name}={number} must be at least 1.")


def check_steps(steps: int) -> None:
    """Raise UserError if the number of integration points is out of range (computing Gauss-Legendre needs memory)."""
    if not 1 <= steps <= MAX_STEPS:
        raise UserError(f"steps={steps}: expected 1 to {MAX_STEPS}.")


def short_names(paths: Sequence[str]) -> list[str]:
    """Name paths by their last component, or by the full path if names are not unique.

    Raises:
        UserError: If a path is given twice.
    """
    twice = {path for path in paths if list(paths).count(path) > 1}
    if twice:
        raise UserError(f"{min(twice)} is given twice.")
    names = [path.rpartition(":")[2].rstrip("/").rpartition("/")[2] or path for path in paths]
    return [path if names.count(name) > 1 else name for path, name in zip(paths, names, strict=True)]


def name_models(checkpoints: Sequence[str]) -> list[str]:
    """Name models after their folders: a run with its experiment, a checkpoint with its run.

    Raises:
        UserError: If two models have the same name.
    """
    names = []
    for checkpoint in checkpoints:
        path = Path(checkpoint)
        parts = [part for part in path.resolve().parts if part != "checkpoints"]
        is_name_or_folder_of_weights = not path.exists() or (path / "config.json").is_file()
        count = 1 if is_name_or_folder_of_weights else 3 if path.is_file() else 2
        names.append("-".join(parts[-count:]).removesuffix(".ckpt"))
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise UserError(f"two models are named {min(twice)}; evaluate them separately, each with its own out.")
    return names


def report(models: Sequence[EvaluationResults], folder: Path | None) -> None:
    """Print the table, and write it to the folder of the results."""
    table = evaluation_table(models)
    print(f"\n{table}")
    if folder is not None:
        with as_user_error():
            with atomic_write(folder / "table.md") as file:
                file.write(f"{table}\n".encode())
            write_csv(folder / "table.csv", models)
        print(f"\nresults in {relative(folder)}")
