"""Helpers that run a command line in a subprocess and record its training steps."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def record(file: Path, **kwargs) -> list[str]:
    """Return the arguments that add the recorder callback."""
    options = [f"--trainer.callbacks.{name}={value}" for name, value in {"file": file, **kwargs}.items()]
    return ["--trainer.callbacks+=tests.dctrain.recorder.Recorder", *options]


def spawn(*args: str, prefix: tuple[str, ...], timeout: int = 180) -> subprocess.CompletedProcess:
    """Run Python in a subprocess with one thread, so that sums do not depend on the machine."""
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
