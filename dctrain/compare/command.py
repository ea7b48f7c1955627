"""The subcommand `compare` of all trainers."""

import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue
from threading import Event

from ..checkpointing.checkpoint import make_folder
from ..errors import UserError
from ..utils.files import file_lock
from .experiment import Experiment, Run, experiment_of, read_experiment
from .report import write_report
from .results import RESULTS, ComparisonResults
from .training import TrainingStopped, environments, run_log_dir, train

STOPPED = "stopped; run the same command again to continue."


def compare_command(program: str, metrics: dict[str, str]) -> Callable[..., None]:
    """Create the subcommand of a trainer.

    Args:
        program: The trainer's module.
        metrics: Default metrics: logged names, and whether "min" or "max" is better.
    """

    def compare(
        experiment: str | None = None,
        config: str | None = None,
        models: Sequence[str] = (),
        seeds: Sequence[int] = (0,),
        out: str | None = None,
        jobs: int = 1,
        report: bool = False,
        extra: Sequence[str] = (),
    ) -> None:
        """Train several models with one recipe over several seeds, and write a table and plots.

        Finished runs are not repeated.

        Args:
            experiment: A YAML file of an experiment (configs/experiments), in place of config, models and seeds.
            config: The recipe, a configuration of `fit`.
            models: Models, each a name followed by settings of `model`, such as "dcvit_small_patch4_32
                model_kwargs.rank=1" or "dcformer_pp_debug overrides.key_wise=false". The first is the baseline.
            seeds: Seeds of weights and data; models with the same seed see the data in the same order.
            out: Folder for runs, results, table and plots; default: runs/compare/NAME of the experiment or recipe.
            jobs: Number of concurrent runs, each on its own GPU, or on its share of the CPU threads.
            report: Only write the report of the finished runs.
            extra: Additional arguments for every run.

        Raises:
            UserError: If a run fails, the folder has results of a different recipe, or an argument is invalid.
        """
        if jobs < 1:
            raise UserError(f"jobs={jobs} must be at least 1.")
        if experiment is not None and (config is not None or models):
            raise UserError("--experiment cannot be combined with config or models; expected one of them.")
        if experiment is None and config is None:
            raise UserError("--experiment or --config is required.")
        if experiment is not None:
            what = read_experiment(experiment, metrics, extra)
        else:
            what = experiment_of(config, models, seeds, metrics, extra)
        root = Path(out or f"runs/compare/{Path(experiment or config).stem}")
        if report:
            _report(what, ComparisonResults(root, what), root)
            return
        make_folder(str(root / "runs"))
        with file_lock(root / ".lock", f"{root} is being compared by another process."):
            _compare(program, what, root, jobs)

    return compare


def _compare(program: str, experiment: Experiment, root: Path, jobs: int) -> None:
    results = ComparisonResults(root, experiment)
    for run in experiment.runs:
        if results.find(run) is not None:
            print(f"{run.key}: already finished, {_score(experiment, results.find(run))}")
    waiting = [run for run in experiment.runs if results.find(run) is None]
    results.write()
    config = root / "runs" / "recipe.yaml"
    config.write_text(results.config)  # a copy for all runs, in case the file changes
    try:
        _train_all(program, experiment, waiting, results, config, jobs)
    finally:
        if any(results.finished(model) for model in experiment.models):
            _report(experiment, results, root)
    if any(results.find(run) is None for run in experiment.runs):
        raise UserError("some runs have failed; run the same command to repeat them.")


def _report(experiment: Experiment, results: ComparisonResults, root: Path) -> None:
    if not any(results.finished(model) for model in experiment.models):
        raise UserError(f"{root / RESULTS} has no finished run of the experiment.")
    print(write_report(experiment, results, root))


def _train_all(
    program: str, experiment: Experiment, waiting: list[Run], results: ComparisonResults, config: Path, jobs: int
) -> None:
    """Train runs concurrently, and store each result immediately."""
    stop, slots = Event(), SimpleQueue()
    for environment in environments(max(1, min(jobs, len(waiting)))):
        slots.put(environment)

    def work(run: Run) -> dict:
        environment = slots.get()
        try:
            if stop.is_set():
                raise TrainingStopped
            _say(f"{run.key} ... (log: {run_log_dir(config.parent, experiment, run)})")
            start = time.monotonic()
            try:
                result = train(program, experiment, run, config, environment, stop)
            except (OSError, ValueError, KeyError) as error:  # an error of this run only: a full disk, a damaged log
                result = {"error": f"{type(error).__name__}: {error}"}
            return result | {"wall_seconds": round(time.monotonic() - start, 1)}
        finally:
            slots.put(environment)

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    pool = ThreadPoolExecutor(jobs)
    try:
        tasks = {pool.submit(work, run): run for run in waiting}
        while tasks:
            for task in wait(tasks, return_when=FIRST_COMPLETED).done:
                _keep(experiment, tasks.pop(task), task, results)
    except (KeyboardInterrupt, TrainingStopped):
        raise UserError(STOPPED) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
        signal.signal(signal.SIGTERM, before)


def _keep(experiment: Experiment, run: Run, task: Future, results: ComparisonResults) -> None:
    result = task.result()
    results.add(run, result)
    message = result.get("error") or f"{_score(experiment, result)} ({result['wall_seconds']:.0f} s)"
    _say(f"{run.key}: {message}")


def _say(line: str) -> None:
    """Print a line atomically, from any thread."""
    print(f"{line}\n", end="", flush=True)


def _score(experiment: Experiment, result: dict) -> str:
    """Format the scores of a run."""
    return ", ".join(f"{metric} {result['curves'][metric][-1][1]:.4f}" for metric in experiment.metrics)
