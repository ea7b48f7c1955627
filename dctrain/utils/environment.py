"""Record of the environment of a result: device, versions, commit."""

import json
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from .files import write_json


def environment(device: torch.device) -> dict:
    """Return the device, the versions and this project's commit ("-dirty" with changes; None outside of a checkout)."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "threads": None if is_cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "triton": _version("triton") if is_cuda else None,
        "python": platform.python_version(),
        "commit": _commit(),
    }


def read_environments(path: Path) -> list[dict]:
    """Read the environments in which a run was trained; [] if the file is missing or damaged."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def add_environment(path: Path, where: dict) -> None:
    """Append an environment to a run's record."""
    write_json(path, [*read_environments(path), where])


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
