"""Train several models with one recipe, over seeds, and write what came out: `python -m dcvision compare`.

Every run is a process of its own (`dcvision fit`), one after another. What has finished is kept in `results.json` of
the folder; the same command again goes on where it stopped, in the middle of a run too. A run that fails leaves the
others alone.
"""

import json
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha1
from pathlib import Path
from typing import IO

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dctrain.checkpoint import make_folder
from dctrain.environment import read_environments
from dctrain.errors import UserError, told_as
from dctrain.files import write_json
from dctrain.flops import forward_flops

from .export import load_network
from .report import write_report

STOPPED = "stopped; the same command goes on."
CURVES = ("val/top1", "val/top5", "val/loss", "train/loss")


def compare(
    config: str, models: Sequence[str], out: str, seeds: Sequence[int] = (0,), extra: Sequence[str] = ()
) -> None:
    """Train several models with one recipe, over seeds, and write a table and a plot.

    What has not been trained yet is trained; what has, is kept.

    Args:
        config: The recipe, a configuration of dcvision fit.
        models: Models, each a name of timm's and settings of `model` behind it, such as
            "dcvit_small_patch4_32 model_kwargs.rank=1".
        out: Folder for runs, results, table and plot.
        seeds: Seeds of weights and data; models share the order of the data of a seed.
        extra: More arguments for every run.

    Raises:
        UserError: If not all runs finish, the folder holds a comparison by another recipe, the configuration does not
            exist, or `extra` sets what is set for each run.
    """
    extra = list(extra)
    _check_extra(extra)
    root = Path(out)
    models = [" ".join(model.split()) for model in models]
    if not all(models):
        raise UserError("--models holds an empty name; accepted: names of models, with settings behind them.")
    state = _load(root, config, extra)
    runs = [(model, seed) for seed in seeds for model in models]
    for number, (model, seed) in enumerate(runs, 1):
        key = f"{model} | seed {seed}"
        said = f"{number}/{len(runs)} {key}"
        if "error" not in state["runs"].get(key, {"error": ""}):
            print(f"{said}: finished before, top-1 {_top1(state['runs'][key])}")
            continue
        print(f"{said} ... (says more: {_log(root / 'runs', model, seed)})", flush=True)
        start = time.monotonic()
        state["runs"][key] = {"model": model, "seed": seed} | _train(root / "runs", config, model, seed, extra)
        write_json(root / "results.json", state)
        result = state["runs"][key]
        outcome = result.get("error") or f"top-1 {_top1(result)}"
        print(f"{said}: {outcome} ({time.monotonic() - start:.0f} s)", flush=True)
    finished = [run for run in state["runs"].values() if "error" not in run]
    if finished:
        print(write_report(finished, root))
    if any("error" in state["runs"][f"{model} | seed {seed}"] for model, seed in runs):
        raise UserError("not all runs have finished; the same command tries them again.")


def _top1(run: dict) -> str:
    """Write the last top-1 accuracy of a run in percent."""
    return f"{100 * run['curves']['val/top1'][-1][1]:.2f} %"


SET_PER_RUN = (
    *("config", "name", "resume", "seed_everything", "data.seed", "model.model"),
    *("trainer.default_root_dir", "trainer.logger"),
)


def _check_extra(extra: list[str]) -> None:
    """Refuse arguments that are set for each run."""
    given = sorted({argument.split("=")[0].removeprefix("--") for argument in extra} & set(SET_PER_RUN))
    if given:
        raise UserError(
            f"--{given[0]} cannot stand after --: it is set for each run; likewise {', '.join(SET_PER_RUN)}."
        )


def _load(root: Path, config: str, extra: list[str]) -> dict:
    """Read what the folder holds already, if it was trained by the same recipe."""
    if not Path(config).is_file():
        raise UserError(f"--config={config} does not exist; accepted: a YAML file of dcvision fit.")
    recipe = {"config": Path(config).read_text(), "extra": extra}
    file = root / "results.json"
    if not file.is_file():
        return {"recipe": recipe, "runs": {}}
    with told_as(f"{file} cannot be read; remove it to read the finished runs again"):
        state = json.loads(file.read_text())
        other = state["recipe"] != recipe
    if other:
        raise UserError(
            f"{root} holds a comparison by another recipe (configuration or arguments); give another --out."
        )
    return state


def _slug(model: str, seed: int) -> str:
    """Name a run's folder."""
    return re.sub(r"[^\w.=-]+", "_", model) + f"-{sha1(model.encode()).hexdigest()[:6]}-seed{seed}"


def _log(root: Path, model: str, seed: int) -> Path:
    """Name the file that a run writes its output to."""
    return root / f"{_slug(model, seed)}.log"


def _train(root: Path, config: str, model: str, seed: int, extra: list[str]) -> dict:
    """Train one model, or go on with it; return its curves and costs, or its error."""
    name, *settings = re.split(r" (?=[\w.]+=)", model)
    slug = _slug(model, seed)
    command = [sys.executable, "-m", "dcvision", "fit", "--config", config, f"--name={slug}", f"--model.model={name}"]
    command += [f"--model.{setting}" for setting in settings]
    command += [f"--seed_everything={seed}", f"--data.seed={seed}", f"--trainer.default_root_dir={root}", *extra]
    run = _newest(root / slug)
    if run is not None:
        command.append(f"--resume={run}")
    log = _log(root, model, seed)
    make_folder(str(log.parent))
    with open(log, "a") as file:
        status = _run(command, file)
    lines = log.read_text().strip().splitlines() or [""]
    if status:
        first = max((at for at, line in enumerate(lines) if line.startswith("error:")), default=len(lines) - 1)
        return {"error": f"failed with status {status}: {' '.join(lines[first:])} (see {log})"}
    if "go on with --resume" in lines[-1]:
        raise UserError(STOPPED)
    run = _newest(root / slug)
    return {"error": f"trained nothing (see {log})"} if run is None else _read(run)


def _run(command: list[str], log: IO[str]) -> int:
    """Run a process and return its status; when this one is told to stop, let it save its checkpoint first."""
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        raise UserError(STOPPED) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def _newest(experiment: Path) -> Path | None:
    """Find the newest version of a run that has a checkpoint; one that was killed before its first has none."""
    versions = {path.parent.parent for path in experiment.glob("version_*/checkpoints/last-*.ckpt")}
    return max(versions, key=lambda path: int(path.name.removeprefix("version_")), default=None)


def _read(run: Path) -> dict:
    """Read where a run ran, its curves, as (step, value), its speed, parameters and FLOPs."""
    log = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
    tags = log.Tags()["scalars"]
    curves = {tag: _curve(log, tag) for tag in CURVES if tag in tags}
    if "val/top1" not in curves:
        return {"error": f"no validation was logged; give data.val and let it run (see {run})"}
    model, size, _ = load_network(str(run))
    speeds = (
        [event.value for event in log.Scalars("train/images_per_second")] if "train/images_per_second" in tags else []
    )
    return {
        "environment": read_environments(run / "environment.json"),
        "curves": curves,
        "images_per_second": statistics.median(speeds) if speeds else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops": forward_flops(model, torch.empty(1, 3, size, size, device="meta")),
    }


def _curve(log: EventAccumulator, tag: str) -> list[tuple[int, float]]:
    """Read a curve; of steps that were taken again after a kill, the last time counts."""
    return sorted({event.step: event.value for event in log.Scalars(tag)}.items())
