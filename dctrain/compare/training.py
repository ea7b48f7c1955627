"""Training one run of a comparison in a process of its own, and reading what it logged."""

import fcntl
import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha1
from pathlib import Path
from threading import Event

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ..callbacks.costs import COSTS
from ..callbacks.speed import logged_speeds
from ..checkpointing.checkpoint import make_folder
from ..evaluation.items import read_items, write_items
from ..utils.environment import read_environments
from .experiment import Experiment, Run

GO_ON = "go on with --resume"  # what a run says that was told to stop
TRAIN_LOSS = "train/loss"
PATIENCE = 0.2  # seconds between looks at a process
MAX_NAME_LENGTH = 60  # of a model's name in the name of a folder


class TrainingStopped(Exception):
    """The runs were told to stop."""


def run_slug(experiment: Experiment, run: Run) -> str:
    """Name a run's folder, by the model's name and by what it is."""
    what = sha1(" ".join([run.model, *sorted(experiment.models[run.model])]).encode()).hexdigest()
    return re.sub(r"[^\w.=-]+", "_", run.model)[:MAX_NAME_LENGTH] + f"-{what[:6]}-seed{run.seed}"


def run_log_dir(root: Path, experiment: Experiment, run: Run) -> Path:
    """Name the file that a run writes its output to."""
    return root / f"{run_slug(experiment, run)}.log"


def train(
    program: str, experiment: Experiment, run: Run, config: Path, environment: dict[str, str], stop: Event
) -> dict:
    """Train a run, or go on with it; return what it logged and cost, or its error.

    Args:
        program: The trainer.
        experiment: What is compared.
        run: What is trained.
        config: The recipe, in the folder where runs are kept.
        environment: Variables of its process.
        stop: Is set when it must end.

    Raises:
        Stopped: If `stop` is set before the end.
    """
    root, slug = config.parent, run_slug(experiment, run)
    command = [sys.executable, "-m", program, "fit", "--config", str(config), f"--name={slug}"]
    command += [f"--seed_everything={run.seed}", f"--data.seed={run.seed}", f"--trainer.default_root_dir={root}"]
    command += [
        "--trainer.enable_progress_bar=false",
        "--trainer.logger=true",
    ]  # curves are read from TensorBoard's files
    command += [*experiment.arguments, *experiment.models[run.model]]
    log = run_log_dir(root, experiment, run)
    make_folder(str(root))
    with _no_other(root / f"{slug}.lock", stop) as lock:
        folder = _newest(root / slug)
        if folder is not None:
            command.append(f"--resume={folder}")
        before = log.stat().st_size if log.is_file() else 0
        status = _run(command, log, environment, stop, lock)
    lines = log.read_bytes()[before:].decode(errors="replace").strip().splitlines() or [""]
    if status:
        first = max((at for at, line in enumerate(lines) if line.startswith("error:")), default=len(lines) - 1)
        how = f"failed with status {status}" if status > 0 else f"was ended by {signal.Signals(-status).name}"
        return {"error": f"{how}: {' '.join(lines[first:])} (see {log})"}
    if any(GO_ON in line for line in lines):
        raise TrainingStopped
    folder = _newest(root / slug)
    if folder is None:
        return {"error": f"trained nothing (see {log})"}
    write_items(run_items(root.parent, experiment, run), read_items(folder))
    return _read(folder, experiment.metrics)


def run_items(results: Path, experiment: Experiment, run: Run) -> Path:
    """Name the folder, beside the results, of what a run's last validation found of each item."""
    return results / "items" / run_slug(experiment, run)


@contextmanager
def _no_other(path: Path, stop: Event) -> Iterator[int]:
    """Wait until no process trains a run, and keep others away; a process that inherits the file does so by itself.

    A comparison that is killed leaves its runs behind, which go on.
    """
    with open(path, "a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stop.wait(PATIENCE):
                    raise TrainingStopped from None
        yield file.fileno()


def _run(command: list[str], log: Path, environment: dict[str, str], stop: Event, lock: int) -> int:
    """Run a process and return its status; let it save a checkpoint if it must stop before its end.

    It has a session of its own: an interrupt from the keyboard reaches it once, through us.
    """
    with open(log, "a") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | environment,
            start_new_session=True,
            pass_fds=[lock],
        )
    while process.poll() is None:
        if stop.wait(PATIENCE):
            process.terminate()
            process.wait()
            raise TrainingStopped
    return process.returncode


def environments(jobs: int) -> list[dict[str, str]]:
    """Share what there is between runs at the same time: a GPU each, or a part of the CPU's threads."""
    if jobs == 1:
        return [{}]
    count = torch.cuda.device_count()
    if count == 0:
        return [{"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // jobs))}] * jobs
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [{"CUDA_VISIBLE_DEVICES": visible[job % count]} for job in range(jobs)]


def _newest(experiment: Path) -> Path | None:
    """Find the newest version of a run that has a checkpoint; one that was killed before its first has none."""
    versions = {path.parent.parent for path in experiment.glob("version_*/checkpoints/last-*.ckpt")}
    return max(versions, key=lambda path: int(path.name.removeprefix("version_")), default=None)


def _read(folder: Path, metrics: Sequence[str]) -> dict:
    """Read where a run ran, its curves, as (step, value), its speed, parameters and FLOPs."""
    log = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = log.Tags()["scalars"]
    missing = [metric for metric in metrics if metric not in tags]
    if missing:
        logged = ", ".join(tag for tag in tags if tag.startswith("val/")) or "no validation"
        return {"error": f"{missing[0]} was not logged, but {logged} (see {folder})"}
    kept = {TRAIN_LOSS, *metrics}
    curves = {tag: _curve(log, tag) for tag in tags if tag in kept or tag.startswith("val/")}
    speeds = logged_speeds(log)
    return {
        "environment": read_environments(folder / "environment.json"),
        "curves": curves,
        "units_per_second": statistics.median(speeds) if speeds else None,
        **json.loads((folder / COSTS).read_text()),
    }


def _curve(log: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    """Read a curve; of steps that were taken again after a kill, the last time counts."""
    return sorted({event.step: event.value for event in log.Scalars(tag)}.items())
