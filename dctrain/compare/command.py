"""The subcommand `compare` of both trainers."""

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
from .results import RESULTS, Results
from .training import TrainingStopped, environments, run_log_dir, train

STOPPED = "stopped; the same command goes on."


def compare_command(program: str, metrics: dict[str, str]) -> Callable[..., None]:
    """Make the subcommand of a trainer.

    Args:
        program: The trainer, a module to run.
        metrics: What counts if an experiment does not say it: logged curves, and whether "min" or "max" is better.
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
        """Train several models with one recipe, over seeds, and write a table and a plot.

        What has not been trained yet is trained; what has, is kept.

        Args:
            experiment: A YAML file that says all (configs/experiments), in place of config, models and seeds.
            config: The recipe, a configuration of `fit`.
            models: Models, each a name and settings of `model` behind it, such as "dcvit_small_patch4_32
                model_kwargs.rank=1" or "dcformer_pp_debug overrides.key_wise=false"; differences are to the first.
            seeds: Seeds of weights and data; models share the order of the data of a seed.
            out: Folder for runs, results, table and plot; runs/compare/NAME of the experiment or recipe if left out.
            jobs: Runs at the same time, each on a GPU of its own, or on its share of the CPU's threads.
            report: Write table and plot of what is there, and train nothing.
            extra: More arguments for every run.

        Raises:
            UserError: If not all runs finish, the folder holds a comparison by another recipe, or an argument is wrong.
        """
        if jobs < 1:
            raise UserError(f"jobs={jobs} must be at least 1.")
        if experiment is not None and (config is not None or models):
            raise UserError("--experiment says what is compared; config and models cannot be given beside it.")
        if experiment is None and config is None:
            raise UserError("--experiment or --config must name what is compared.")
        if experiment is not None:
            what = read_experiment(experiment, metrics, extra)
        else:
            what = experiment_of(config, models, seeds, metrics, extra)
        root = Path(out or f"runs/compare/{Path(experiment or config).stem}")
        if report:
            _report(what, Results(root, what), root)
            return
        make_folder(str(root / "runs"))
        with file_lock(root / ".lock", f"{root} is being compared by another process."):
            _compare(program, what, root, jobs)

    return compare


def _compare(program: str, experiment: Experiment, root: Path, jobs: int) -> None:
    results = Results(root, experiment)
    for run in experiment.runs:
        if results.find(run) is not None:
            print(f"{run.key}: finished before, {_score(experiment, results.find(run))}")
    waiting = [run for run in experiment.runs if results.find(run) is None]
    results.write()
    config = root / "runs" / "recipe.yaml"
    config.write_text(results.config)  # for all runs, whatever becomes of the file
    try:
        _train_all(program, experiment, waiting, results, config, jobs)
    finally:
        if any(results.finished(model) for model in experiment.models):
            _report(experiment, results, root)
    if any(results.find(run) is None for run in experiment.runs):
        raise UserError("not all runs have finished; the same command tries them again.")


def _report(experiment: Experiment, results: Results, root: Path) -> None:
    if not any(results.finished(model) for model in experiment.models):
        raise UserError(f"{root / RESULTS} holds no finished run of the experiment.")
    print(write_report(experiment, results, root))


def _train_all(
    program: str, experiment: Experiment, waiting: list[Run], results: Results, config: Path, jobs: int
) -> None:
    """Train runs, some at the same time, and keep what comes out as soon as it does."""
    stop, slots = Event(), SimpleQueue()
    for environment in environments(max(1, min(jobs, len(waiting)))):
        slots.put(environment)

    def work(run: Run) -> dict:
        environment = slots.get()
        try:
            if stop.is_set():
                raise TrainingStopped
            _say(f"{run.key} ... (says more: {run_log_dir(config.parent, experiment, run)})")
            start = time.monotonic()
            try:
                result = train(program, experiment, run, config, environment, stop)
            except (OSError, ValueError, KeyError) as error:  # of this run alone: a full disk, a damaged log
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


def _keep(experiment: Experiment, run: Run, task: Future, results: Results) -> None:
    result = task.result()
    results.add(run, result)
    said = result.get("error") or f"{_score(experiment, result)} ({result['wall_seconds']:.0f} s)"
    _say(f"{run.key}: {said}")


def _say(line: str) -> None:
    """Print a line whole, whichever thread prints at the same time."""
    print(f"{line}\n", end="", flush=True)


def _score(experiment: Experiment, result: dict) -> str:
    """Say what a run came to."""
    return ", ".join(f"{metric} {result['curves'][metric][-1][1]:.4f}" for metric in experiment.metrics)
