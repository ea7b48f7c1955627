"""Training one run of a comparison in a separate process, and reading its log."""

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

GO_ON = "continue with --resume"  # printed by a stopped run
TRAIN_LOSS = "train/loss"
PATIENCE = 0.2  # seconds between checks of a process
MAX_NAME_LENGTH = 60  # of a model's name in a folder name


class TrainingStopped(Exception):
    """The comparison was stopped."""


def run_slug(experiment: Experiment, run: Run) -> str:
    """Name of a run's folder: the model's name and a hash of its settings."""
    what = sha1(" ".join([run.model, *sorted(experiment.models[run.model])]).encode()).hexdigest()
    return re.sub(r"[^\w.=-]+", "_", run.model)[:MAX_NAME_LENGTH] + f"-{what[:6]}-seed{run.seed}"


def run_log_dir(root: Path, experiment: Experiment, run: Run) -> Path:
    """Path of a run's output file."""
    return root / f"{run_slug(experiment, run)}.log"


def train(
    program: str, experiment: Experiment, run: Run, config: Path, environment: dict[str, str], stop: Event
) -> dict:
    """Train or resume a run; return its metrics and costs, or its error.

    Args:
        program: The trainer.
        experiment: The experiment.
        run: The run.
        config: The recipe, in the folder of the runs.
        environment: Environment variables of its process.
        stop: Set when the run must stop.

    Raises:
        TrainingStopped: If `stop` is set before the end.
    """
    root, slug = config.parent, run_slug(experiment, run)
    command = [sys.executable, "-m", program, "fit", "--config", str(config), f"--name={slug}"]
    command += [f"--seed_everything={run.seed}", f"--data.seed={run.seed}", f"--trainer.default_root_dir={root}"]
    command += [
        "--trainer.enable_progress_bar=false",
        "--trainer.logger=true",
    ]  # metrics are read from TensorBoard's files
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
        return {"error": f"no training steps were run (see {log})"}
    write_items(run_items(root.parent, experiment, run), read_items(folder))
    return _read(folder, experiment.metrics)


def run_items(results: Path, experiment: Experiment, run: Run) -> Path:
    """Folder with the per-item results of a run's last validation."""
    return results / "items" / run_slug(experiment, run)


@contextmanager
def _no_other(path: Path, stop: Event) -> Iterator[int]:
    """Wait for and hold the lock of a run; a process that inherits the file keeps the lock.

    The runs of a killed comparison continue.
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
    """Run a process and return its status; on a stop let it save a checkpoint.

    The process has its own session, so that it receives a keyboard interrupt only once, from this process.
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
    """Divide the resources between concurrent runs: one GPU each, or a share of the CPU threads."""
    if jobs == 1:
        return [{}]
    count = torch.cuda.device_count()
    if count == 0:
        return [{"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // jobs))}] * jobs
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [{"CUDA_VISIBLE_DEVICES": visible[job % count]} for job in range(jobs)]


def _newest(experiment: Path) -> Path | None:
    """Return the newest version of a run with a checkpoint; None if there is none."""
    versions = {path.parent.parent for path in experiment.glob("version_*/checkpoints/last-*.ckpt")}
    return max(versions, key=lambda path: int(path.name.removeprefix("version_")), default=None)


def _read(folder: Path, metrics: Sequence[str]) -> dict:
    """Read a run's environment, metrics as (step, value), speed, parameters and FLOPs."""
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
    """Read a metric; if a step was repeated after a kill, the last value counts."""
    return sorted({event.step: event.value for event in log.Scalars(tag)}.items())
