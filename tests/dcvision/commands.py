"""Running the command line in this process or in another."""

import os
import subprocess
import sys
from pathlib import Path

from dcvision.cli import main

ROOT = Path(__file__).parents[2]

SMALL = [
    *("--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    *("--trainer.max_epochs=3", "--trainer.gradient_clip_val=1.0", "--trainer.log_every_n_steps=1"),
    *("--model.lr=0.003", "--model.mixup_alpha=0.3", "--model.warmup_steps=2"),
    *("--data.batch_size=4", "--data.min_crop_area=0.5", "--data.max_bad_images=5", "--name=t"),
    "--model.model_kwargs={proj_drop_rate: 0.1, depth: 2}",
]


def small(shards: str, root: Path) -> list[str]:
    """Arguments of a tiny run on the numbered shards: ten batches of four in an epoch."""
    return [
        *SMALL,
        f"--data.train=shards:{shards}",
        f"--data.val=shards:{shards}",
        f"--trainer.default_root_dir={root}",
    ]


def record(file: Path, **kwargs) -> list[str]:
    """Arguments that add the recorder."""
    options = [f"--trainer.callbacks.{name}={value}" for name, value in {"file": file, **kwargs}.items()]
    return ["--trainer.callbacks+=tests.dctrain.recorder.Recorder", *options]


def run(*args: str) -> None:
    """Run the command line here."""
    main(list(args))


def spawn(*args: str, timeout: int = 180, prefix: tuple[str, ...] = ("-m", "dcvision")) -> subprocess.CompletedProcess:
    """Run the command line in a process of its own; one thread, so that sums do not depend on the machine."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, *prefix, *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
    )
